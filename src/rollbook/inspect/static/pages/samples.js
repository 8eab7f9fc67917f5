// samples.js: the list of groups and samples over all steps, with its filter.

import { el, empty } from "../dom.js";
import { recordList } from "../lists.js";

/** Opens the list over all steps. */
export async function openSamples(context) {
  const { root, run } = context;
  const list = recordList(context, { step: null, views: ["samples", "groups"], label: "Samples of all steps" });
  empty(root,
    el("div", { class: "bar" }, el("h1", { text: "Samples" }),
      el("span", { class: "muted", text: context.api.isStatic ? "of this file" : "of all steps; filter by any column, such as reward < 0.2 and truncated" })),
    list.root);
  let knownCount = run.records;
  return {
    title: "Samples",
    crumbs: [{ text: "samples" }],
    ready: list.ready(),
    keys: list.keys,
    live(change) {
      if (change.records > knownCount) list.grew(change.records - knownCount);
      knownCount = change.records;
    },
    close: list.close,
  };
}
