// Reads the binary frame of trajectories that the server (frames.py) and single files send.
// Invariant: entry i of every array of a decoded trajectory speaks of token i, and text.slice(ends[i - 1], ends[i]) is token i.

const FRAME_ARRAYS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i4: Int32Array, f4: Float32Array };

let frameHalves = null;

// All 65,536 half floats as single ones, made when a frame first holds halves (single files do).
function frameHalfTable() {
  if (frameHalves !== null) return frameHalves;
  frameHalves = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits += 1) {
    const sign = bits & 0x8000 ? -1 : 1;
    const exponent = (bits >> 10) & 31;
    const fraction = bits & 1023;
    if (exponent === 31) frameHalves[bits] = fraction ? NaN : sign * Infinity;
    else if (exponent === 0) frameHalves[bits] = sign * fraction * 2 ** -24;
    else frameHalves[bits] = sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  }
  return frameHalves;
}

function frameArray(buffer, base, blob) {
  const [offset, bytes, type] = blob;
  const at = base + offset;
  if (at + bytes > buffer.byteLength) throw new RangeError("truncated frame: an array is incomplete");
  if (type === "f2") {
    const halves = new Uint16Array(buffer.slice(at, at + bytes));
    const table = frameHalfTable();
    const out = new Float32Array(halves.length);
    for (let i = 0; i < halves.length; i += 1) out[i] = table[halves[i]];
    return out;
  }
  const Type = FRAME_ARRAYS[type];
  if (Type === undefined) throw new RangeError("the frame has an array of an unknown type");
  const size = Type.BYTES_PER_ELEMENT;
  return at % size === 0 ? new Type(buffer, at, bytes / size) : new Type(buffer.slice(at, at + bytes));
}

function frameTrajectory(buffer, base, header) {
  const { blobs, rejected, ...fields } = header;
  const count = fields.tokens;
  const [textAt, textBytes] = blobs.text;
  // A text may open with U+FEFF: it is data, not a mark of the encoding.
  const text = new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(buffer, base + textAt, textBytes));
  const widths = frameArray(buffer, base, blobs.widths);
  const ends = new Uint32Array(count);
  let end = 0;
  for (let i = 0; i < count; i += 1) {
    end += widths[i];
    ends[i] = end;
  }
  if (end !== text.length) throw new RangeError("token widths do not add up to the text");
  const arrays = {};
  for (const [name, blob] of Object.entries(blobs)) {
    if (name.startsWith("array:")) arrays[name.slice(6)] = frameArray(buffer, base, blob);
  }
  const segments = (fields.segments ?? []).map(([role, kind, name, start, stop, trained, turn]) => ({
    role, kind, name, start, stop, trained: Boolean(trained), turn,
  }));
  return {
    ...fields,
    segments,
    text,
    ends,
    ids: blobs.ids ? frameArray(buffer, base, blobs.ids) : null,
    flags: frameArray(buffer, base, blobs.flags),
    versions: blobs.versions ? frameArray(buffer, base, blobs.versions) : null,
    arrays,
    rejected: rejected ? frameTrajectory(buffer, base, rejected) : null,
  };
}

// decodeFrame(buffer) -> trajectories, in the order of the frame; RangeError where the bytes are not a whole frame.
export function decodeFrame(buffer) {
  if (buffer.byteLength < 8) throw new RangeError("truncated frame: expected at least 8 bytes");
  const length = new DataView(buffer).getUint32(0, true);
  if (4 + length > buffer.byteLength) throw new RangeError("truncated frame: the header is incomplete");
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  if (header.version !== 1) throw new RangeError("unsupported frame version: reload the page");
  const base = Math.ceil((4 + length) / 8) * 8;
  return header.trajectories.map((trajectory) => frameTrajectory(buffer, base, trajectory));
}

// Whether token i is trained on, and whether it is a special token.
export const MASK_BIT = 1;
export const SPECIAL_BIT = 2;
