"""The tables of README, docs and the journal are those of the committed result files."""

import functools
import itertools
import json
import re
import shutil
import subprocess

import pytest

from benchmarks.common import RESULTS, ROOT
from benchmarks.tables import __main__ as tables
from benchmarks.tables import figures, plots
from benchmarks.tables.markdown import LOST
from vllm_kvretrieval.retrieval.presets import OWN

BLOCK = "<!-- table: {} -->\n{}<!-- end of table -->\n"
STEPS = "steps decode-fill-fier.json"
FIGURE = "As fast as <!--f1-->{1}.\n\n<!-- figures:\nf1: {0}\n-->\n"
FULL = f"{STEPS} @ 32,768; 1 @ fier"
TOKENS_PLOT = ROOT / "docs/plots/tokens/decode-small-pages.svg"
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


def test_the_first_picture_shows_other_engines_where_they_were_measured(tmp_path):
    """In a panel of their own, since they are of another run; a line for each program."""
    shutil.copy(RESULTS / "decode-small-pages.json", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("![Tokens](plots/tokens/decode-small-pages.svg)\n")
    (committed,) = plots.drawn(page, RESULTS).values()
    assert committed == TOKENS_PLOT.read_text()
    (before,) = plots.drawn(page, tmp_path).values()
    lanes = ("llama.cpp q8_0, no fa", "vLLM", "kvretrieval", "full", "llama.cpp q8_0, fa")
    places = itertools.product(enumerate(lanes), (8192, 32768))
    cells = [
        {"lane": lane, "figure": "steps", "context": context, "value": n + context / 1024}
        for (n, lane), context in places
    ]
    fastest = {lane.split()[0]: lane for lane in reversed(lanes) if lane != "full"}
    assert plots._tokens_of_peers({"cells": cells}) == {
        name: {c["context"]: c["value"] for c in cells if c["lane"] == lane}
        for name, lane in fastest.items()
    }
    cells.append({"lane": "mistral.rs", "figure": "steps", "context": 8192, "reason": "none"})
    (tmp_path / "peers-smollm2.json").write_text(json.dumps({"cells": cells}))
    (after,) = plots.drawn(page, tmp_path).values()
    assert "llama.cpp" in after
    assert "mistral.rs" not in after
    assert after.count("a token of the answer, ms") == 2 * before.count("a token of the answer, ms")


def test_all_builds_of_a_file_stand_below_its_table(tmp_path):
    """A file may hold cells of an earlier build; a commit with the same code is not another one."""
    page = BLOCK.format("sparse prefill.json", "")
    store = json.loads((RESULTS / "prefill.json").read_text())
    own, cells = store["build"], store["cells"].values()
    (other,) = (cell["build"] for cell in cells if "build" in cell)
    assert other["code"] != own["code"]
    lost = f"{other['commit']} that is in no history"
    assert f"(builds {own['commit']}, {lost}, 2026" in tables.rendered(page)
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


def test_measured_steps_stand_beside_predicted_ones(tmp_path):
    """Of engines that a GPU has run: see `benchmarks.gpu.engine_decode`."""
    shutil.copy(RESULTS / "gpu_predicted.json", tmp_path)
    store = json.loads((tmp_path / "gpu_predicted.json").read_text())
    store["results"] = {
        "stock": [],
        "stock, memory": {"used": 1},
        "stock, decode 2048, batch 1": {"fits": True, "ms": 6.25},
        "device, decode 2048, batch 1": {"fits": True, "ms": 7.75},
        "device, decode 131072, batch 8": {"fits": False, "needs_gib": 128.0},
        "device, decode 32768, batch 1": None,
    }
    (tmp_path / "gpu_day.json").write_text(json.dumps(store))
    page = BLOCK.format("predicted gpu_predicted.json gpu_day.json", "")
    header, _, *rows = tables.rendered(page, tmp_path).splitlines()[1:]
    assert header.endswith("| measured: stock vLLM, ms | measured: `home=device`, ms |")
    ends = {row[:20].split("|")[1:3][0].strip(): row.split("|")[-3:-1] for row in rows[:8:2]}
    assert [cell.strip() for cell in ends["2,048"]] == ["6.2", "7.8"]
    assert [cell.strip() for cell in ends["32,768"]] == ["", ""]
    (last,) = [row for row in rows if row.startswith("| 131,072 | 8 ")]
    assert last.endswith("|  | does not fit |")


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


def git(*arguments):
    return subprocess.check_output(["git", "-C", str(ROOT), *arguments], text=True).strip()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an archive has no history")
def test_builds_are_in_the_history():
    if git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("a part of the history is not here")
    found = {
        build
        for page in tables.pages()
        for names in re.findall(r"\(builds? (.*?), \d{4}-", page.read_text())
        for build in re.findall(r"\b[0-9a-f]{9}\b", names)
    }
    known = {commit[:9] for commit in git("rev-list", "HEAD").splitlines()}
    assert found - known <= LOST


def test_a_figure_follows_its_cell():
    """As many decimals as the page has; a quotient in percent where the page says so."""
    for asked, before, after in (
        (FULL, "1", "22"),
        (FULL, "99.9", "21.6"),
        (f"{STEPS} @ 32,768; 1 @ fier, ms; speed-up", "1.00 times", "2.84 times"),
        (f"{FULL} / {STEPS} @ 32,768; 4 @ fier", "0.00", "0.44"),
        (f"{FULL} / {STEPS} @ 32,768; 4 @ fier", "1 % of", "44 % of"),
    ):
        page = FIGURE.format(asked, before)
        assert tables.rendered(page) == page.replace(f">{before}", f">{after}")


@pytest.mark.parametrize(
    ("asked", "figure", "message"),
    [
        (STEPS, "1", "no TABLE @ ROW @ HEADING"),
        (f"{STEPS} @ 32,768 @ fier", "1", "2 rows begin so"),
        (f"{STEPS} @ 4,096; 1 @ fier", "1", "0 rows begin so"),
        (f"{STEPS} @ 32,768; 1 @ quest", "1", "no column 'quest'"),
        (f"{FULL} / {FULL} / {FULL}", "1", "a quotient has two cells"),
        (FULL, "about 1", "no number right behind it"),
    ],
)
def test_a_figure_that_no_table_has(asked, figure, message):
    with pytest.raises(figures.FigureError, match=message):
        tables.rendered(FIGURE.format(asked, figure))


def test_a_figure_is_bound_once():
    page = FIGURE.format(FULL, "21.6")
    for wrong in (
        page.replace("f1: ", "f2: "),
        page.replace("-->\n", f"f1: {FULL}\n-->\n"),
        page.replace("-->\n", f"f2: {FULL}\n-->\n"),
        page.replace("As fast", "<!--x-->As <!--f1-->1 and fast"),
    ):
        with pytest.raises(figures.FigureError, match=r"not bound once .*: f[12]"):
            tables.rendered(wrong)


@pytest.mark.parametrize("before", ["", "  ", "- "])
def test_a_figure_does_not_begin_a_line(before):
    """Markdown would show the line as it is: its links, too."""
    page = FIGURE.format(FULL, "21.6").replace("As fast as ", f"As fast as\n{before}")
    with pytest.raises(figures.FigureError, match="line 2 begins with"):
        tables.rendered(page)


def test_another_digit_in_a_sentence_is_found(monkeypatch):
    """Every decimal of README's results, but for tables and versions, has a result file."""
    monkeypatch.setattr(tables, "_table", functools.cache(tables._table))
    pages = {page: page.read_text() for page in tables.pages()}
    marks = [(text, mark) for text in pages.values() for mark in figures.MARK.finditer(text)]
    assert len(marks) > 20
    for text, mark in marks:
        digit = mark.start("figure")
        other = text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]
        assert figures.MARK.sub("", other) == figures.MARK.sub("", text)
        assert tables.rendered(other) == text
    readme = pages[ROOT / "README.md"]
    results = readme.partition("\n## Results")[2].partition("\n## ")[0]
    prose = figures.MARK.sub("", tables.BLOCK.sub("", results))
    prose = re.sub(r"\([^)]*\)|`[^`]*`", "", prose)
    assert not re.findall(r"\b\d+\.\d+\b", prose)


def test_presets_are_counted():
    """Published are all but ours, the baseline and the bound."""
    published = OWN.keys() - {"kvretrieval", "full", "oracle"}
    counts = f"[{len(OWN)} presets](methods.md#presets), {len(published)} of them published"
    assert counts in (ROOT / "docs" / "compare.md").read_text()
