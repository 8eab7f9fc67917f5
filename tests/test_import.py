"""Looking is free: `import rollbook` is quick, and columns can be read without ever loading torch."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import venv
from pathlib import Path

import rollbook
from rollbook import Experience
from tests.strategies import full_record

HEAVY = ("torch", "pyarrow", "transformers", "datasets", "pandas", "polars", "duckdb", "numpy")
PUBLIC = {"EID", "Batch", "CustomField", "Experience", "Experiences", "RollbookError", "Trainer", "WireError"}


def child(script: str, *arguments: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_quick() -> None:
    script = """
import time
start = time.perf_counter()
import rollbook
print(time.perf_counter() - start)
"""
    # The best of five: what the machine does besides only ever adds.
    assert min(float(child(script)) for _ in range(5)) < 0.3


def test_import_loads_nothing_heavy() -> None:
    script = f"""
import sys
import rollbook
rollbook.__version__, dir(rollbook), rollbook.__all__
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert child(script) == "[]"


def test_names_load_when_used() -> None:
    script = """
import sys
import rollbook
assert "rollbook.core.ids" not in sys.modules
rollbook.EID(1, 2)
assert "rollbook.core.ids" in sys.modules
assert "torch" not in sys.modules and "pyarrow" not in sys.modules
rollbook.Experience(tokens=[1, 2])
assert "torch" in sys.modules
assert "EID" in vars(rollbook) and "Experience" in vars(rollbook)
print("loaded")
"""
    assert child(script) == "loaded"


def test_public_names() -> None:
    assert set(rollbook.__all__) >= PUBLIC | {"__version__"}
    assert set(dir(rollbook)) >= set(rollbook.__all__) | {"core", "experience", "train", "wire"}
    assert sorted(set(rollbook.__all__)) == sorted(rollbook.__all__)


def test_every_public_name_loads() -> None:
    # In a process of its own for each: a name must not depend on another having been loaded before it.
    script = """
import os, sys, torch, pyarrow
assert "rollbook" not in sys.modules
for name in sys.argv[1:]:
    if not os.fork():
        import rollbook
        value = getattr(rollbook, name)
        assert value.__name__ == name
        assert getattr(rollbook, name) is value
        os._exit(0)  # without torch's farewell, half a second
    assert os.wait()[1] == 0, name
print(len(sys.argv) - 1)
"""
    assert child(script, *sorted(PUBLIC)) == str(len(PUBLIC))


def test_everything_listed_loads() -> None:
    script = """
import types
from rollbook import *
import rollbook
assert all(name in globals() for name in rollbook.__all__)
names = [name for name in dir(rollbook) if not name.startswith("_")]
values = [getattr(rollbook, name) for name in names]
print(sum(isinstance(value, types.ModuleType) for value in values) >= 5)
"""
    assert child(script) == "True"


def test_a_name_that_is_not_there() -> None:
    script = """
import rollbook
try:
    rollbook.Experiense
except AttributeError as error:
    print(error)
assert not hasattr(rollbook, "torch_like")
"""
    assert child(script) == "module 'rollbook' has no attribute 'Experiense'"


def test_columns_are_read_without_torch(tmp_path: Path) -> None:
    rows = [full_record(kind, seed) for seed, kind in enumerate(["single_turn", "multi_turn"])]
    (tmp_path / "rows.rollbook").write_bytes(Experience.serialize_many(rows))
    script = """
import sys
import rollbook.core.wire, rollbook.core.fields, rollbook.core.ragged, rollbook.core.experiences
import rollbook.core.ids, rollbook.core.freeform
from rollbook.core.experiences import Experiences
assert "torch" not in sys.modules, "after the imports"
data = open(sys.argv[1], "rb").read()
many = rollbook.core.wire.decode(data)
with open(sys.argv[1], "rb") as file:
    frames = list(rollbook.core.wire.iter_frames(file))
assert [len(frame) for frame in frames] == [2]
assert len(many) == 2
tokens = many.column("tokens")
assert tokens.values.sum() == sum(tokens.values.tolist())
assert tokens.lengths.tolist() == [5, 5]
assert many.column("advantages").values.dtype == "float32"
assert many.column("action_mask").present.all()
assert [eid.run for eid in many.eids()] == [0, 1]
assert many.values("reward") == [0.5, 1.5]
assert many.values("prompt_text") == ["prompt_text 漢 0", "prompt_text 漢 1"]
assert many.values("info") == [{"n": 0}, {"n": 1}]
assert many.values("experience_type") == ["single_turn", "multi_turn"]
assert many.token_lengths().tolist() == [5, 5]
assert many.prompt_lengths().tolist() == [2, 2]
assert repr(many) == "Experiences(2 records, 10 tokens)"
assert list(many.group_by("run")) == ["1/t%2F0/0", "1/t%2F1/1"]
assert many[1:].values("reward") == [1.5]
assert many[[1, 0]].values("reward") == [1.5, 0.5]
small = rollbook.core.wire.encode(many.compact(), compression="zstd")
assert rollbook.core.wire.decode(small).values("reward") == [0.5, 1.5]
from rollbook.io import from_table, to_table
assert from_table(to_table(many)).values("reward") == [0.5, 1.5]
assert "torch" not in sys.modules, "after reading columns"
try:
    rollbook.core.wire.decode(data[:-64])
except rollbook.WireError:
    pass
assert "torch" not in sys.modules, "after damaged bytes"
assert many[1].reward == 1.5
assert "torch" in sys.modules
print("read")
"""
    assert child(script, str(tmp_path / "rows.rollbook")) == "read"


def environment_without_torch(folder: Path) -> Path:
    """Make a virtual environment of links to the core dependencies and DuckDB; return its Python."""
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in ("numpy", "orjson", "pyarrow", "xxhash", "duckdb"):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {".."}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(distribution.locate_file(top)))
    (packages / "rollbook.pth").write_text(str(Path(rollbook.__file__).parents[1]))
    return folder / "bin" / "python"


def test_commands_run_where_torch_is_not_installed(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book:
        book.append([full_record(kind, seed) for seed, kind in enumerate(["single_turn", "multi_turn"])])
        uid = book.where().uids()[0]
    (tmp_path / "verl.jsonl").write_text('{"input": "a", "output": "b", "score": 1.0, "step": 1}\n')
    python = environment_without_torch(tmp_path / "light")
    commands = [
        ["ls", "book"],
        ["show", "book", uid],
        ["doctor", "book"],
        ["sql", "book", "select count(*) from experiences"],
        ["history", "book", uid],
        ["diff", "book", "book"],
        ["check", "book"],
        *(["export", "book", f"out.{ending}"] for ending in ("jsonl", "parquet", "frames")),
        ["export", "book", "out.html", "--id", uid],
        ["import", "copy", "out.parquet"],
    ]
    script = f"""
import contextlib, importlib.util, io
from rollbook.cli import main
assert importlib.util.find_spec("torch") is None
for command in {commands}:
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(command) in (0, 1), command
from urllib.request import Request, urlopen
from rollbook.inspect.server import Server
with Server("book") as server:
    headers = {{"Authorization": f"Bearer {{server.token}}"}}
    assert urlopen(Request(f"http://127.0.0.1:{{server.port}}/api/run", headers=headers)).status == 200
assert main(["import", "copy", "verl.jsonl", "--format", "verl"]) == main(["train"]) == 2
import rollbook
assert rollbook.train.__name__ == "rollbook.train" and rollbook.inspect.doctor.CHECKS
for name in ("rollbook.Experience", "rollbook.trajectory_saver", "rollbook.train.Trainer"):
    try:
        eval(name)
    except ModuleNotFoundError as error:
        assert str(error).endswith(" needs torch: install the extra 'torch' of Rollbook"), error
    else:
        raise AssertionError(name)
"""
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.jsonl").read_bytes().count(b"\n") == 2
    assert "rollbook import: rollbook.core.experience needs torch: install the extra 'torch' of Rollbook" in done.stderr
    assert "rollbook train: " in done.stderr and done.stderr.count("install the extra '") == 2


def test_engines_and_rewards_wait_for_what_is_heavy() -> None:
    script = """
import sys
import rollbook.compat.lightrft
import rollbook.models
import rollbook.rewards
from rollbook.rewards import RewardInput, as_reward
from rollbook.rollout import Prompt, Sampling, ScriptedEngine
scores = as_reward(lambda response: len(response))([RewardInput(prompt="", response="four")])
assert scores.rewards == [4.0]
assert ScriptedEngine([[7]]).generate("hello", Sampling(n=2))[1].response_ids == [7]
print([name for name in ("torch", "pyarrow", "transformers", "httpx", "peft", "PIL", "jsonschema", "math_verify")
       if name in sys.modules])
"""
    assert child(script) == "[]"


def test_no_code_of_a_models_repository_is_run() -> None:
    """Every call that loads a model, tokenizer or processor of transformers says so itself."""
    root = Path(rollbook.__file__).parent
    lacking = []
    for file in sorted(root.rglob("*.py")):
        source = file.read_text()
        if "from_pretrained" not in source and "from_config" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            function = node.func if isinstance(node, ast.Call) else None
            if not isinstance(function, ast.Attribute) or function.attr not in ("from_pretrained", "from_config"):
                continue
            passed = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            runs_none = ast.unparse(function.value).endswith(("PeftModel", "GenerationConfig"))
            if passed.get("trust_remote_code") != "False" and not runs_none:
                lacking.append(f"{file.relative_to(root)}:{node.lineno}")
    assert lacking == []
