"""The tables of README and docs are those of the committed result files."""

import json
import shutil

import pytest

from benchmarks.common import RESULTS, ROOT
from benchmarks.tables import __main__ as tables
from benchmarks.tables import plots

BLOCK = "<!-- table: {} -->\n{}<!-- end of table -->\n"
STEPS = "steps decode-fill-fier.json"
STEPS_PLOT = ROOT / "docs/plots/steps/decode-fill.svg"


def test_pages_are_as_written():
    for page in tables.pages():
        assert tables.rendered(page.read_text()) == page.read_text(), (
            f"{page.name}: run python -m benchmarks.tables"
        )


def test_every_kind_stands_on_a_page():
    used = {
        block["words"].split()[0]
        for page in tables.pages()
        for block in tables.BLOCK.finditer(page.read_text())
    }
    assert used == tables.KINDS.keys()


def test_a_table_follows_its_file(tmp_path):
    shutil.copy(RESULTS / "decode-fill-fier.json", tmp_path)
    page = f"Text.\n{BLOCK.format(STEPS, 'old figures')}More text.\n"
    before = tables.rendered(page, tmp_path)
    assert "old figures" not in before
    assert before.startswith("Text.\n")
    assert before.endswith("More text.\n")
    assert tables.rendered(before, tmp_path) == before
    store = json.loads((tmp_path / "decode-fill-fier.json").read_text())
    for cell in store["cells"]:
        for repeat in cell["engines"]["fier"]["step_ms"]:
            repeat["mean"] *= 2
    (tmp_path / "decode-fill-fier.json").write_text(json.dumps(store))
    assert tables.rendered(page, tmp_path) != before


def test_a_cell_of_several_files_is_the_firsts(tmp_path):
    shutil.copy(RESULTS / "ruler-16k-512.json", tmp_path / "first.json")
    store = json.loads((tmp_path / "first.json").read_text())
    for cell in store["cells"].values():
        cell["score"] = 0.0 if cell["variant"] == "full" else 12.5
        cell["variant"] = cell["variant"].replace("kvretrieval", "another")
    (tmp_path / "second.json").write_text(json.dumps(store))
    of_first, of_both = (
        tables.rendered(BLOCK.format(f"ruler {files}", ""), tmp_path).splitlines()
        for files in ("first.json", "first.json second.json")
    )
    added = [line for line in of_both if line not in of_first]
    assert [line.split()[1] for line in added if line.startswith("|")] == ["another"]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        (BLOCK.format("steeps decode-fill-fier.json", ""), "unknown kind of table 'steeps'"),
        (BLOCK.format("steps no-such-file.json", ""), "no-such-file"),
        (BLOCK.format("methods decode-fill-fier.json", ""), "context"),
        ("<!-- table: steps decode-fill-fier.json -->\nno end", "end of table"),
    ],
)
def test_a_table_that_cannot_be_made(page, message):
    with pytest.raises(tables.TableError, match=message):
        tables.rendered(page)


def test_rows_have_as_many_cells_as_the_heading(monkeypatch):
    """Also where one file of several lacks a row, as the decode table's files do."""
    page = BLOCK.format("decode whole-attention.json whole-attention-avx2.json", "")
    row = next(line for line in tables.rendered(page).splitlines() if "| float16" in line)
    assert row.count("|") == 11
    assert "| float16 |  |  |  |  | 1." in row
    monkeypatch.setitem(tables.KINDS, "decode", lambda *_: "| a | b |\n| --- | --- |\n| 1 |\n")
    with pytest.raises(tables.TableError, match="as many cells"):
        tables.rendered(page)


def test_a_build_with_changes_says_so(tmp_path):
    store = json.loads((RESULTS / "decode-fill-fier.json").read_text())
    page = BLOCK.format(STEPS, "")
    commit = store["build"]["commit"]
    assert f"(build {commit}, " in tables.rendered(page)
    store["build"]["dirty"] = True
    (tmp_path / "decode-fill-fier.json").write_text(json.dumps(store))
    assert f"(build {commit} with changes, " in tables.rendered(page, tmp_path)


def test_check_writes_nothing(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(BLOCK.format(STEPS, ""))
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "pages", lambda: [page])
    monkeypatch.setattr("sys.argv", ["tables", "--check"])
    assert tables.main() == 1
    assert page.read_text() == BLOCK.format(STEPS, "")
    assert "page.md: differs" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["tables"])
    assert tables.main() == 0
    monkeypatch.setattr("sys.argv", ["tables", "--check"])
    assert tables.main() == 0


def test_plots_follow_their_files(tmp_path):
    """The committed plots are those of the result files; another figure is another plot."""
    drawn = {path: svg for page in tables.pages() for path, svg in plots.drawn(page).items()}
    assert {path.parent.name for path in drawn} == plots.KINDS.keys()
    assert all(path.read_text() == drawn[path] for path in drawn), "run python -m benchmarks.tables"
    shutil.copy(RESULTS / "decode-fill.json", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("![Steps](plots/steps/decode-fill.svg)\n")
    before = plots.drawn(page, tmp_path)
    assert [*before.values()] == [drawn[STEPS_PLOT]]
    store = json.loads((tmp_path / "decode-fill.json").read_text())
    for repeat in store["cells"][-1]["engines"]["freekv"]["step_ms"]:
        repeat["mean"] *= 2
    (tmp_path / "decode-fill.json").write_text(json.dumps(store))
    assert plots.drawn(page, tmp_path) != before


def test_all_builds_of_a_file_stand_below_its_table(tmp_path):
    """A file may hold cells of an earlier build; a commit with the same code is not another one."""
    page = BLOCK.format("sparse prefill.json", "")
    store = json.loads((RESULTS / "prefill.json").read_text())
    own, cells = store["build"], store["cells"].values()
    (other,) = (cell["build"] for cell in cells if "build" in cell)
    assert other["code"] != own["code"]
    assert f"(builds {own['commit']}, {other['commit']}, 2026" in tables.rendered(page)
    other["code"] = own["code"]
    (tmp_path / "prefill.json").write_text(json.dumps(store))
    assert f"(build {own['commit']}, 2026" in tables.rendered(page, tmp_path)


def test_a_row_of_methods_names_its_build(tmp_path):
    words = "methods decode-fill-fier.json context=32768 batches=1"
    store = json.loads((RESULTS / "decode-fill-fier.json").read_text())
    own = store["build"]["commit"]
    assert f"| fier | {own} |" in tables.rendered(BLOCK.format(words, ""))
    first = next(cell for cell in store["cells"] if cell["batch"] == 1)
    other = first | {"build": first["build"] | {"commit": "another", "code": "other"}}
    store["cells"].append(other)
    (tmp_path / "decode-fill-fier.json").write_text(json.dumps(store))
    assert f"| fier | {own}, another |" in tables.rendered(BLOCK.format(words, ""), tmp_path)


def test_a_stall_of_the_machine_is_no_slow_prefill(tmp_path):
    page = BLOCK.format("sparse prefill.json", "")
    store = json.loads((RESULTS / "prefill.json").read_text())
    cells = store["cells"]
    before = tables.rendered(page)
    up = cells["8192/exact"]["cpu_s"][0] / cells["8192/2048:512"]["cpu_s"][0]
    assert f"| {up:.2f}x |" in before
    cells["8192/2048:512"]["prefill_s"] = [1000.0]
    (tmp_path / "prefill.json").write_text(json.dumps(store))
    after = tables.rendered(page, tmp_path)
    assert "| 1000.0 |" in after
    assert after.replace("| 1000.0 |", "| 15.3 |") == before
