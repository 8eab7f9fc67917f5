"""SQL over sources: what is loaded, what is refused, what stops, what comes out; and tables out of unlike batches."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from math import isnan, nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollbook
from rollbook import EID, Experience, Experiences
from rollbook.book.query import QueryError, QueryTimeoutError, Result, run_query, superset, unify


class Recorded:
    """A source that keeps what it was asked for."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self.schema = table.schema
        self.requested: list[list[str]] = []

    def load(self, columns: list[str]) -> pa.Table:
        self.requested.append(columns)
        return self.table.select(columns)

    @property
    def touched(self) -> set[str]:
        return {name for columns in self.requested for name in columns}


def runs(count: int = 4) -> Recorded:
    rows = np.arange(count)
    return Recorded(
        pa.table(
            {
                "eid": pa.array([f"e{i}" for i in rows], pa.large_string()),
                "task": pa.array([f"t{i % 2}" for i in rows], pa.large_string()),
                "step": pa.array(rows, pa.int64()),
                "reward": pa.array(rows / 2),
                "tokens": pa.array([[int(i)] * int(i % 3) for i in rows], pa.large_list(pa.int32())),
                "logprobs": pa.array([[int(i) % 7] for i in rows], pa.large_list(pa.uint16())),
                "info": pa.array([{"n": int(i), "note": "x"} for i in rows]),
            }
        )
    )


# --- what is loaded ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "columns"),
    [
        ("select reward from runs", {"reward"}),
        ("select count(*) from runs", {"eid"}),
        ("select avg(reward) from runs where task = 't1'", {"reward", "task"}),
        ("select step from runs where reward > 0.1 and task <> 'tokens' and task = 't1'", {"step", "reward", "task"}),
        ("select step from runs where task in ('t0', 't1') and eid is not null", {"step", "task", "eid"}),
        ("select len(tokens) from runs", {"tokens"}),
        ("select info.n from runs where info.n = 2", {"info"}),
        ("with best as (select task, max(reward) r from runs group by task) from best", {"task", "reward"}),
        ("select a.step from runs a join runs b on a.step = b.step where b.task = 't0'", {"step", "task"}),
        ("select step from runs where reward = (select max(reward) from runs)", {"step", "reward"}),
        ("from runs select * exclude (tokens, logprobs, info)", {"eid", "task", "step", "reward"}),
        ("pivot (select task, step from runs) on task using sum(step)", {"task", "step"}),
        ("describe runs", set()),
        ("show tables", set()),
        ("explain select tokens from runs", set()),
        ("explain analyze select step from runs", {"step"}),
        ("summarize select step from runs", {"step"}),
        ("values (1), (2)", set()),
    ],
)
def test_only_the_columns_that_a_query_uses_are_loaded(query: str, columns: set[str]) -> None:
    source, other = runs(), runs()
    run_query(query, {"runs": source, "other": other})
    assert source.touched == columns
    assert other.requested == []


def test_a_column_that_is_used_twice_is_loaded_once() -> None:
    source = runs()
    run_query("select a.reward, b.reward, b.step from runs a, runs b", {"runs": source})
    assert sorted(name for columns in source.requested for name in columns) == ["reward", "step"]


def test_a_large_query_over_scalars_does_not_touch_tokens() -> None:
    source = runs(100_000)
    result = run_query(
        "select task, count(*) n, avg(reward) from runs where step >= 50000 group by task", {"runs": source}
    )
    assert sorted(result.rows()) == [("t0", 25_000, 37499.5), ("t1", 25_000, 37500.0)]
    assert source.touched == {"task", "reward", "step"}


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_chunks_of_a_table_do_not_matter(size: int) -> None:
    table = runs(1000).table
    pieces = pa.concat_tables([table.slice(start, size) for start in range(0, 1000, size)])
    query = "select eid, tokens, reward from runs where reward < 300 and task = 't0' order by step"
    assert run_query(query, {"runs": Recorded(pieces)}).arrow() == run_query(query, {"runs": Recorded(table)}).arrow()


def test_nan_is_kept_by_filters_as_duckdb_orders_it() -> None:
    source = Recorded(pa.table({"id": [1, 2, 3, 4], "reward": [0.0, 1.0, nan, None]}))

    def ids(condition: str) -> list[int]:
        return [row[0] for row in run_query(f"select id from runs where {condition} order by id", {"runs": source})]

    assert ids("reward > 0.5") == [2, 3]  # NaN is above all numbers in SQL
    assert ids("reward <> 1") == [1, 3]
    assert ids("isnan(reward)") == [3]
    assert ids("reward = 'nan'::double") == [3]
    assert ids("reward is null") == [4]
    assert ids("reward between 0 and 5") == [1, 2]


def test_half_floats_and_odd_names_can_be_queried() -> None:
    half = pa.array([[1.5], [2.5, 3.0], None], pa.large_list(pa.float16()))
    source = Recorded(pa.table({"x y": half, 'a"b': [1, 2, 3], "empty": pa.nulls(3)}))
    result = run_query('select "x y" from odd where "a""b" > 1', {"odd": source})
    assert result.rows() == [([2.5, 3.0],), (None,)]
    assert run_query("from odd", {"odd": source}).columns == ["x y", 'a"b', "empty"]


def test_an_empty_table_has_its_columns() -> None:
    source = runs(0)
    assert run_query("from runs", {"runs": source}).columns == source.schema.names
    assert run_query("select count(*), sum(step) from runs", {"runs": source}).rows() == [(0, None)]


def test_parameters_by_place_and_by_name() -> None:
    source = runs()
    assert run_query("select step from runs where step > ?", {"runs": source}, parameters=[2]).rows() == [(3,)]
    named = run_query("select step from runs where task = $task", {"runs": source}, parameters={"task": "t1"})
    assert named.rows() == [(1,), (3,)]
    with pytest.raises(QueryError, match="parameter"):
        run_query("select ?", {})
    with pytest.raises(QueryError, match="parameters: got 'ab'"):
        run_query("select ?, ?", {}, parameters="ab")


def test_errors_of_a_source_come_through() -> None:
    class Broken(Recorded):
        def load(self, columns: list[str]) -> pa.Table:
            raise FileNotFoundError("segment 7 is gone")

    with pytest.raises(FileNotFoundError, match="segment 7"):
        run_query("from runs", {"runs": Broken(runs().table)})


def test_a_source_that_breaks_its_word_is_an_error() -> None:
    class Narrow(Recorded):
        def load(self, columns: list[str]) -> pa.Table:
            return pa.table({name: pa.array([1], pa.int32()) for name in columns})

    class Growing(Recorded):
        def load(self, columns: list[str]) -> pa.Table:
            self.requested.append(columns)
            return self.table.select(columns).slice(0, len(self.requested))

    with pytest.raises(ValueError, match="column 'step': got int32, expected int64"):
        run_query("select step from runs", {"runs": Narrow(runs().table)})
    with pytest.raises(ValueError, match="loads gave 1 and 2 rows"):
        run_query("select a.step, b.reward from runs a, runs b", {"runs": Growing(runs().table)})
    twice = Recorded(pa.table([[1], [2]], names=["a", "a"]))
    with pytest.raises(ValueError, match="names a column twice"):
        run_query("select 1", {"twice": twice})
    with pytest.raises(QueryError, match="differ in more than case"):
        run_query("select 1", {"runs": runs(), "Runs": runs()})


def test_a_name_that_is_not_there_gets_the_names_that_are() -> None:
    sources = {"experiences": runs(), "events": runs()}
    with pytest.raises(
        QueryError, match=r"(?s)Table with name experience does not exist.*the tables are: experiences, e"
    ):
        run_query("from experience", sources)
    with pytest.raises(QueryError, match=r'(?s)"rewards" not found.*columns of experiences, events: eid, task'):
        run_query("select rewards from experiences", sources)
    with pytest.raises(QueryError, match="syntax error"):
        run_query("selec 1", sources)


# --- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "kind"),
    [
        ("copy runs to 'out.csv'", "COPY"),
        ("copy (select 1) to 'out.parquet' (format parquet)", "COPY"),
        ("/* é */ -- select\n CoPy runs to 'out.csv'", "COPY"),
        ("attach 'other.db'", "ATTACH"),
        ("install httpfs", "INSTALL"),
        ("load httpfs", "LOAD"),
        ("pragma database_list", "PRAGMA"),
        ("set memory_limit = '90GB'", "SET"),
        ("reset threads", "RESET"),
        ("create table z (a int)", "CREATE"),
        ("create temp table z as pivot runs on task using sum(step)", "CREATE"),
        ("create macro f() as 1", "CREATE"),
        ("create secret s (type s3)", "CREATE"),
        ("insert into runs values (1)", "INSERT"),
        ("update runs set step = 1", "UPDATE"),
        ("delete from runs", "DELETE"),
        ("drop view runs", "DROP"),
        ("alter table runs add column a int", "ALTER"),
        ("call pragma_version()", "CALL"),
        ("export database 'out'", "EXPORT"),
        ("import database 'out'", "IMPORT"),
        ("begin", "BEGIN"),
        ("checkpoint", "CHECKPOINT"),
        ("vacuum", "VACUUM"),
        ("prepare p as select 1", "PREPARE"),
        ("execute p", "EXECUTE"),
        ("use other", "USE"),
        ("update extensions", "UPDATE"),
        ("explain copy runs to 'out.csv'", "COPY"),
        ("explain analyze create table z as select 1", "CREATE"),
        ("explain (analyze, format json) create temp table z as select 1", "CREATE"),
        ("explain /* ; */ analyze insert into runs values (1)", "INSERT"),
    ],
)
def test_statements_that_do_not_read_are_refused_by_name(query: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=rf"query: got {kind}\b.*expected one statement that reads"):
        run_query(query, {"runs": runs()})


def test_one_statement_and_no_less() -> None:
    for query in ("", " ; ", "-- only a comment"):
        with pytest.raises(QueryError, match="expected one statement"):
            run_query(query, {})
    with pytest.raises(QueryError, match="got 2 statements"):
        run_query("select 1; select 2", {})
    with pytest.raises(QueryError, match="got 2 statements"):
        run_query("select 1; copy (select 1) to 'x'", {})
    assert run_query("select ';' -- ;", {}).rows() == [(";",)]
    with pytest.raises(QueryError, match="expected a string"):
        run_query("select '\ud800'", {})
    with pytest.raises(QueryError, match="expected a string"):
        run_query(b"select 1", {})  # type: ignore[arg-type]


secret_table = pa.table({"secret": ["in a Python variable"]})

ATTACKS = [
    "from read_csv('{file}')",
    "from read_text('{file}')",
    "from read_blob('{file}')",
    "from read_json('{file}')",
    "from read_parquet('{file}')",
    "from parquet_metadata('{file}')",
    "from sniff_csv('{file}')",
    "from '{file}'",
    'from "{file}"',
    "from '{folder}/*.csv'",
    "from glob('{folder}/*')",
    "from read_csv(['{file}'])",
    "from query('from read_text(''{file}'')')",
    "from query_table('{file}')",
    "from query('copy runs to ''{folder}/out.csv''')",
    "select (select content from read_text('{file}'))",
    "with q as (from read_text('{file}')) from q",
    "explain analyze from read_text('{file}')",
    "describe from read_csv('{file}')",
    "summarize from '{file}'",
    "from json_execute_serialized_sql(json_serialize_sql('from read_text(''{file}'')'))",
    "from 'https://example.com/a.parquet'",
    "from read_parquet('s3://bucket/a.parquet')",
    "from sqlite_scan('{file}', 't')",
    "from postgres_scan('host=localhost', 'public', 't')",
    "select getenv('HOME')",
    "from secret_table",
    "from pa",
    "from arrow_scan(1, 2, 3)",
    "from arrow_scan(1::pointer, 1::pointer, 1::pointer)",
    "from python_arrow_scan(140000000000000)",
    "from pandas_scan(140000000000000)",
    "from python_map_function((select 1))",
    "from enable_logging()",
    "from enable_profiling()",
    "from duckdb_extensions()",
    "from load_aws_credentials()",
    "from start_ui()",
    "with q as (insert into runs values (1) returning *) from q",
    "with q as (delete from runs returning *) from q",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_outside_the_sources_can_be_reached(attack: str, tmp_path: Path) -> None:
    file = tmp_path / "secret.csv"
    file.write_text("secret\nkey\n")
    with pytest.raises(QueryError) as caught:
        run_query(attack.format(file=file, folder=tmp_path), {"runs": runs()})
    assert "key" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["secret.csv"]


def test_settings_are_locked_and_secrets_and_other_databases_are_none() -> None:
    settings = dict(run_query("select name, value from duckdb_settings()", {}).rows())
    assert settings["enable_external_access"] == "false"
    assert settings["lock_configuration"] == "true"
    assert settings["autoload_known_extensions"] == settings["autoinstall_known_extensions"] == "false"
    assert settings["python_enable_replacements"] == "false"
    assert settings["temp_directory"] == ""
    assert run_query("from duckdb_secrets()", {}).rows() == []
    assert run_query("show databases", {}).rows() == [("memory",)]


def test_a_query_leaves_nothing_for_the_next() -> None:
    run_query("pivot runs on task using sum(step) group by reward", {"runs": runs()})
    assert run_query("show tables", {}).rows() == []
    assert run_query("select count(*) from duckdb_types() where not internal", {}).rows() == [(0,)]
    with pytest.raises(QueryError, match="the tables are: none"):
        run_query("from runs", {})


# --- limits -----------------------------------------------------------------------------------------------------

ENDLESS = [
    "select sum(r) from range(1000000000000) t(r)",
    "from range(1000000000000)",
    "with recursive r as (select 1 i union all select i + 1 from r) select max(i) from r",
    "select count(*) from runs a, runs b, range(100000000000)",
]


@pytest.mark.parametrize("query", ENDLESS)
def test_a_query_is_stopped_after_its_time(query: str) -> None:
    start = time.monotonic()
    with pytest.raises(QueryTimeoutError, match=r"stopped after 0\.1 seconds"):
        run_query(query, {"runs": runs()}, seconds=0.1, memory="8GB")
    assert time.monotonic() - start < 20


def test_time_counts_while_a_source_loads() -> None:
    class Slow(Recorded):
        def load(self, columns: list[str]) -> pa.Table:
            time.sleep(0.3)
            return super().load(columns)

    with pytest.raises(QueryTimeoutError):
        run_query("select a.step from runs a, runs b where b.reward > 1", {"runs": Slow(runs().table)}, seconds=0.1)


def test_memory_is_bounded() -> None:
    with pytest.raises(QueryError, match=r"(?s)Out of Memory.*memory: 50000000 bytes were allowed"):
        run_query("select r from range(100000000) t(r) order by hash(r) limit 1 offset 50000000", {}, memory="50MB")
    with pytest.raises(QueryError, match="result has more than 20000000 bytes"):
        run_query("from range(100000000)", {}, memory=20_000_000)
    assert run_query("select current_setting('memory_limit')", {}, memory="1GiB").rows() == [("1.0 GiB",)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "lots"}, "memory: got 'lots'"),
        ({"memory": "1iB"}, "memory: got '1iB'"),
        ({"memory": 0}, "memory: got 0"),
        ({"seconds": -1}, "seconds: got -1"),
        ({"threads": 0}, "threads: got 0"),
        ({"max_rows": -1}, "max_rows: got -1"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_query("select 1", {}, **options)  # type: ignore[arg-type]


def test_max_rows_stops_an_endless_answer() -> None:
    result = run_query("from range(1000000000000)", {}, max_rows=10_000)
    assert len(result) == 10_000
    assert result.more
    assert result.rows()[-1] == (9999,)
    exact = run_query("from range(10)", {}, max_rows=10)
    assert (len(exact), exact.more) == (10, False)
    assert run_query("from range(10)", {}, max_rows=0).more


@pytest.mark.parametrize("query", ENDLESS[:2])
def test_ctrl_c_stops_the_query(query: str) -> None:
    # A shell starts what is to run in the background with this signal ignored, and the tests with it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    begun = time.monotonic()
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_query(query, {}, memory="8GB", threads=4)
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - begun < 30  # of the 60 seconds that a query may take
    assert run_query("select 1", {}).rows() == [(1,)]
    # The connections that count are this one and the one that all are made from.
    assert run_query("select count from duckdb_connection_count()", {}, memory="8GB").rows()[0][0] <= 2


def test_threads_do_not_see_each_other() -> None:
    wrong = []

    def ask(number: int) -> None:
        source = Recorded(pa.table({"n": [number] * 100}))
        for _ in range(10):
            rows = run_query("select distinct n from mine", {"mine": source}).rows()
            if rows != [(number,)]:
                wrong.append(rows)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


PYTHON = [sys.executable, "-W", "ignore:This process:DeprecationWarning"]
"""Python 3.12 warns of a fork beside other threads, which is what these tests do."""
FORK = """
import os, sys
from rollbook.book.query import run_query
assert run_query("select 1", {}, threads=2).rows() == [(1,)]
child = os.fork()
if child == 0:
    sys.exit(7 if run_query("select 2", {}, threads=2).rows() == [(2,)] else 1)
status = os.waitpid(child, 0)[1]
print(os.WIFEXITED(status) and os.WEXITSTATUS(status), run_query("select 3", {}, threads=2).rows())
"""


def test_a_forked_child_can_ask_and_leave() -> None:
    ended = subprocess.run([*PYTHON, "-c", FORK], capture_output=True, text=True, timeout=60, check=True)
    assert (ended.stdout, ended.stderr) == ("7 [(3,)]\n", "")


EXIT = """
import os, sys
import rollbook
from rollbook.cli import main
import duckdb, pyarrow.dataset
folder = sys.argv[1]
for i in range(20):
    child = os.fork()
    if child == 0:
        query = "select * from experiences limit 2"
        if i % 2:
            sys.exit(main(["sql", folder, query]) or 2)
        book = rollbook.open(folder)
        sys.exit(len(book.sql(query).rows()))
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 2, (i, status)
"""


def test_a_process_that_asked_for_a_few_of_many_rows_exits_cleanly(tmp_path: Path) -> None:
    # 60,000 records in pieces, of which Arrow's threads read ahead; processes that have it all imported take a moment.
    with rollbook.open(tmp_path / "book") as book:
        for batch in range(60):
            rows = [Experience(eid=EID(batch, i), tokens=[1, 2, 3], reward=0.5) for i in range(1000)]
            book.append(Experiences(rows))
    command = [*PYTHON, "-c", EXIT, str(tmp_path / "book")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


# --- what comes out ---------------------------------------------------------------------------------------------


def test_types_pass_through() -> None:
    source = runs()
    table = run_query("select tokens, task, logprobs, info, step from runs order by step", {"runs": source}).arrow()
    kinds = [field.type for field in table.schema]
    text = pa.large_string()
    assert kinds[:3] == [pa.large_list(pa.int32()), text, pa.large_list(pa.uint16())]
    assert kinds[3] == pa.struct([("n", pa.int64()), ("note", text)])
    assert kinds[4] == pa.int64()
    assert table.column("tokens").to_pylist() == source.table.column("tokens").to_pylist()


def test_every_way_out_says_the_same() -> None:
    result = run_query("select step, task, reward, tokens from runs order by step", {"runs": runs()})
    rows = [(0, "t0", 0.0, []), (1, "t1", 0.5, [1]), (2, "t0", 1.0, [2, 2]), (3, "t1", 1.5, [])]
    assert result.columns == ["step", "task", "reward", "tokens"]
    assert len(result) == 4
    assert result.rows() == list(result) == rows
    assert result.dicts() == [dict(zip(result.columns, row, strict=True)) for row in rows]
    assert result.arrow().num_rows == 4
    assert [tuple(row[:3]) for row in result.pandas().itertuples(index=False)] == [row[:3] for row in rows]
    assert result.polars().rows() == rows


def test_sums_of_integers_are_integers_and_names_are_distinct() -> None:
    result = run_query("select sum(step), sum(step), 1 as a, 2 as a, 3 as a_1 from runs", {"runs": runs()})
    assert result.rows() == [(6, 6, 1, 2, 3)]
    assert result.arrow().schema.field(0).type == pa.int64()
    assert result.columns == ["sum(step)", "sum(step)_1", "a", "a_2", "a_1"]
    huge = run_query("select sum(a) from t", {"t": Recorded(pa.table({"a": [2**62] * 4}))})
    assert huge.rows() == [(Decimal(2**64),)]


def test_times_need_no_further_package() -> None:
    source = Recorded(pa.table({"at": pa.array([0], pa.timestamp("us", tz="UTC"))}))
    (value,) = run_query("from t", {"t": source}).rows()[0]
    assert value.timestamp() == 0


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_query("select 1 as a", {})
    real = builtins.__import__

    def without(name: str, *rest: object, **more: object) -> object:
        if name in ("polars", "duckdb"):
            raise ImportError(name)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install polars"):
        result.polars()
    with pytest.raises(ImportError, match=r"install the extra 'sql' of Rollbook"):
        run_query("select 1", {})
    monkeypatch.undo()
    old = type(sys)("duckdb")
    old.__version__ = "1.4.4"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "duckdb", old)
    with pytest.raises(ImportError, match=r"DuckDB 2\.0 or later, not 1\.4\.4"):
        run_query("select 1", {})


def test_the_text_is_short_and_printable() -> None:
    table = pa.table(
        {
            "text": ["\x1b[31mred\nline", "y" * 500, None],
            "tokens": [list(range(8192)), [1, 2], None],
            "score": [0.1 + 0.2, nan, None],
        }
    )
    shown = repr(Result(table))
    assert shown.splitlines()[1].split("  ")[0] == r"\x1b[31mred\nline"
    assert "[0, 1, 2, 3, … 8192 in all]" in shown
    assert "NULL" in shown
    assert "0.3\n" in shown
    assert max(map(len, shown.splitlines())) <= 160
    wide = repr(Result(pa.table({f"column_{i}": ["z" * 30] for i in range(40)})))
    assert max(map(len, wide.splitlines()[:-1])) <= 160
    assert "35 more columns: column_5, column_6" in wide
    assert "(980 more rows)" in repr(Result(pa.table({"a": range(1000)})))
    assert repr(run_query("select 1 as a limit 0", {})) == "a\n(no rows)"
    assert "DUMMY_SCAN" in repr(run_query("explain (format json) select 1", {}))


def test_the_html_is_escaped() -> None:
    page = Result(pa.table({"<b>": ["<script>alert(1)</script>", "a & b"]}))._repr_html_()
    assert "<script" not in page
    assert "<th>&lt;b&gt;</th>" in page
    assert "a &amp; b" in page


# --- one table of unlike batches --------------------------------------------------------------------------------

INTEGERS = {kind: (np.iinfo(str(kind)).min, np.iinfo(str(kind)).max) for kind in map(
    pa.type_for_alias, ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)}  # fmt: skip
SCALARS = st.sampled_from([*INTEGERS, pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.null()])
TEXTS = st.sampled_from([pa.string(), pa.large_string(), pa.null(), pa.dictionary(pa.int8(), pa.string())])


def lists(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    return st.one_of(
        inner.map(pa.list_), inner.map(pa.large_list), st.tuples(inner, st.integers(1, 2)).map(lambda p: pa.list_(*p))
    )


FAMILIES = st.sampled_from(
    [SCALARS, TEXTS, lists(SCALARS), lists(lists(SCALARS)), SCALARS.map(lambda kind: pa.struct([("a", kind)]))]
)


def values(kind: pa.DataType) -> st.SearchStrategy[object]:
    """Python values that a type holds exactly, and that every wider type does."""
    if pa.types.is_null(kind):
        return st.none()
    if kind in INTEGERS:
        low, high = INTEGERS[kind]
        some: st.SearchStrategy[object] = st.integers(max(low, -(2**53)), min(high, 2**53))
    elif pa.types.is_floating(kind):
        some = st.floats(width=kind.bit_width, allow_nan=False)
    elif pa.types.is_boolean(kind):
        some = st.booleans()
    elif pa.types.is_struct(kind):
        some = st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    elif pa.types.is_fixed_size_list(kind):
        some = st.lists(values(kind.value_type), min_size=kind.list_size, max_size=kind.list_size)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        some = st.lists(values(kind.value_type), max_size=3)
    else:
        some = st.text(max_size=5)
    return st.none() | some


@st.composite
def batches(draw: st.DrawFn) -> list[pa.RecordBatch]:
    """Batches whose columns come and go, and whose types stay in the family of their column."""
    families = {name: draw(FAMILIES) for name in ("a", "b", "c")}
    drawn = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(0, 3))
        columns = {}
        for name in draw(st.lists(st.sampled_from(sorted(families)), min_size=1, unique=True)):
            kind = draw(families[name])
            column = draw(st.lists(values(kind), min_size=count, max_size=count))
            columns[name] = pa.array(column, kind)
        drawn.append(pa.record_batch(columns))
    return drawn


@given(batches())
def test_unify_keeps_every_value(batches_drawn: list[pa.RecordBatch]) -> None:
    table = unify(batches_drawn)
    assert table.schema == superset(batch.schema for batch in batches_drawn)
    expected = [
        {name: row.get(name) for name in table.column_names} for batch in batches_drawn for row in batch.to_pylist()
    ]
    assert table.to_pylist() == expected
    table.validate(full=True)


@given(batches())
def test_superset_holds_each_of_its_schemas_in_any_order(batches_drawn: list[pa.RecordBatch]) -> None:
    schemas = [batch.schema for batch in batches_drawn]
    joined = superset(schemas)
    assert superset([joined]) == joined
    for schema in schemas:
        assert superset([joined, schema]) == joined
    other = superset(schemas[::-1])
    assert {field.name: field.type for field in other} == {field.name: field.type for field in joined}


@given(batches())
def test_what_unify_makes_can_be_queried(batches_drawn: list[pa.RecordBatch]) -> None:
    table = unify(batches_drawn)
    assert run_query("select count(*) from t", {"t": Recorded(table)}).rows() == [(table.num_rows,)]


@pytest.mark.parametrize("wrapped", [lambda kind: kind, pa.list_, pa.large_list, lambda kind: pa.struct([("x", kind)])])
def test_bools_beside_numbers_that_only_a_decimal_holds(wrapped: Any) -> None:
    kinds = (pa.int8(), pa.uint64(), pa.bool_())
    parts = [
        pa.record_batch({"a": pa.array([_wrapped(wrapped, value)], wrapped(kind))})
        for kind, value in zip(kinds, (-1, 2**64 - 1, True), strict=True)
    ]
    assert unify(parts).column("a").to_pylist() == [_wrapped(wrapped, value) for value in (-1, 2**64 - 1, 1)]


def _wrapped(wrap: Any, value: Any) -> Any:
    kind = wrap(pa.int8())
    return {"x": value} if pa.types.is_struct(kind) else value if kind == pa.int8() else [value]


def test_columns_whose_types_agree_are_not_copied() -> None:
    first = pa.record_batch({"a": pa.array([1, 2]), "b": pa.array([1], pa.int32()).take([0, 0])})
    second = pa.record_batch({"a": pa.array([3]), "b": pa.array([2**40])})
    table = unify([first, second])
    addresses = [chunk.buffers()[1].address for chunk in table.column("a").chunks]
    assert addresses == [batch.column("a").buffers()[1].address for batch in (first, second)]
    assert table.column("b").to_pylist() == [1, 1, 2**40]
    same = unify([second, second])
    assert same.column("b").chunk(0).buffers()[1].address == second.column("b").buffers()[1].address


@pytest.mark.parametrize(
    ("first", "second", "joined"),
    [
        (pa.int32(), pa.int64(), pa.int64()),
        (pa.uint8(), pa.int8(), pa.int16()),
        (pa.uint64(), pa.int8(), pa.decimal128(20, 0)),
        (pa.int64(), pa.float32(), pa.float64()),
        (pa.int16(), pa.float32(), pa.float32()),
        (pa.bool_(), pa.int8(), pa.int8()),
        (pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.large_list(pa.int64())),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int16(), 2), pa.list_(pa.int16(), 2)),
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3), pa.large_list(pa.int8())),
        (pa.string(), pa.large_string(), pa.large_string()),
        (pa.binary(), pa.binary(4), pa.large_binary()),
        (pa.null(), pa.large_string(), pa.large_string()),
        (pa.timestamp("s"), pa.timestamp("us"), pa.timestamp("us")),
        (
            pa.struct([("a", pa.int8())]),
            pa.struct([("b", pa.string()), ("a", pa.int32())]),
            pa.struct([("a", pa.int32()), ("b", pa.string())]),
        ),
    ],
)
def test_the_rule_for_each_pair(first: pa.DataType, second: pa.DataType, joined: pa.DataType) -> None:
    assert superset([pa.schema([("x", first)]), pa.schema([("x", second)])]).field("x").type == joined


def test_whole_numbers_stay_exact_beside_each_other_and_round_beside_floats() -> None:
    big = pa.record_batch({"n": pa.array([2**64 - 1], pa.uint64())})
    low = pa.record_batch({"n": pa.array([-1], pa.int8())})
    assert unify([big, low]).column("n").to_pylist() == [2**64 - 1, -1]
    large = pa.record_batch({"n": [2**53 + 1]})
    assert unify([large, pa.record_batch({"n": [0.5]})]).column("n").to_pylist() == [2.0**53, 0.5]
    assert isnan(unify([low, pa.record_batch({"n": [nan]})]).column("n")[1].as_py())


def test_types_without_a_common_one_are_refused_by_column() -> None:
    number, text = pa.record_batch({"x": [1]}), pa.record_batch({"x": ["a"]})
    with pytest.raises(ValueError, match="column 'x': got int64 and string"):
        unify([number, text])
    nested = [pa.schema([("x", pa.struct([("y", kind)]))]) for kind in (pa.int8(), pa.list_(pa.int8()))]
    with pytest.raises(ValueError, match=r"column 'x\.y': got int8 and list"):
        superset(nested)
    zones = [pa.schema([("at", pa.timestamp("us", tz=zone))]) for zone in (None, "UTC")]
    with pytest.raises(ValueError, match="column 'at'"):
        superset(zones)
    with pytest.raises(ValueError, match="column 'a': stands twice"):
        superset([pa.schema([("a", pa.int8()), ("a", pa.int8())])])


def test_a_given_schema_selects_orders_and_bounds() -> None:
    parts = [pa.record_batch({"a": [1], "b": ["x"]}), pa.record_batch({"b": ["y"]})]
    table = unify(parts, pa.schema([("b", pa.large_string()), ("a", pa.int64())]))
    assert table.column_names == ["b", "a"]
    assert table.to_pydict() == {"b": ["x", "y"], "a": [1, None]}
    with pytest.raises(ValueError, match="column 'a': got int64, which int8 cannot hold"):
        unify(parts, pa.schema([("a", pa.int8())]))
    assert unify([], parts[0].schema).num_rows == 0
