"""The figures on README and in docs/results are what commands printed; which are old is seen."""

import json
import re

import pytest

from tests.harness import ROOT, load, said

figures = load("bench/pages")
RESULTS = figures.read()
PAGES = {page.stem: page.read_text() for page in figures.pages()}
BLOCKS = {name: page for page, text in PAGES.items() for _, name, _ in figures.BLOCK.findall(text)}


# ---- pages ----


@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_are_what_commands_printed(page):
    text = PAGES[page]
    assert text.count("<!-- figures: ") == len(figures.BLOCK.findall(text)), "a block without an end"
    assert figures.fill(text, RESULTS) == text, "has other blocks than figures.json: ./run.sh figures --pages"


FORMULAS = [row for row in figures.ROWS if row.command.startswith("python bench/tables.py")]


@pytest.mark.parametrize("row", FORMULAS, ids=lambda row: row.name)
def test_tables_of_formulas_are_what_they_print_now(row):
    make = load("bench/tables").TABLES[row.command.split()[-1]]
    assert said(make)[0] == RESULTS[row.name]["text"] + "\n"


def test_each_command_has_a_result_and_a_block_on_its_page():
    rows = {row.name: row.page for row in figures.ROWS}
    assert len(rows) == len(figures.ROWS), "two rows have the same name"
    assert rows.keys() == RESULTS.keys()
    views = {name: BLOCKS[name] for name in figures.VIEWS}
    assert rows | views == BLOCKS


def test_a_digit_that_somebody_changes_is_seen():
    for name, page in BLOCKS.items():
        block = re.search(rf"<!-- figures: {name} -->.*?<!-- end -->", PAGES[page], re.S)[0]
        body, digit = re.search(r"(.*)(\d)", block, re.S).groups()
        changed = PAGES[page].replace(f"{body}{digit}", f"{body}{(int(digit) + 1) % 10}")
        assert figures.fill(changed, RESULTS) == PAGES[page] != changed


# ---- ratios ----


TABLES = """zero3 --size small --batch 8 --steps 2 | 2 ranks, one host | 9 rounds | torch 2.13.0+cpu
after 3 steps weights differ by 2.1e-09 (root mean square)
                                 ms      ratio      least       most
  zero3.py                   250.00      1.000      1.000      1.000
  ddp.py                     100.00      2.500      2.500      2.500
  compute alone              200.00      1.250      1.191      1.297
  FSDP2                      324.29      0.771      0.752      0.861
  FSDP2, explicit prefetch   240.00      1.042      0.910      1.124
  FSDP2, no reshard          289.00      0.865      0.864      0.920
  DeepSpeed 3                not installed

zero3 --size small --batch 8 --steps 1 | 2 ranks, 2 hosts, 1gbit | 9 rounds | torch 2.13.0+cpu
  zero3.py                   300.00      1.000      1.000      1.000      25.72     213.67       1.43
  FSDP2                      500.00      0.600      0.590      0.610      38.60     308.80       1.62

ddp --size small --accum 2 | 4 ranks, one host, slowed | 9 rounds | torch 2.13.0+cpu
  ddp.py                     300.00      1.000      1.000      1.000
  torch DDP                  290.00      1.034      1.010      1.100

ddp --size small | 1 ranks, one host, host time | 9 rounds | torch 2.13.0+cpu
  ddp.py                     300.00      1.000      1.000      1.000
  torch DDP                  200.00      1.500      1.010      1.600"""


def test_tables_of_ratios_have_the_peers_fastest_setting_in_each_place_and_losing_rows_stand_alone():
    results = {"a": {"text": TABLES}, "b": {"text": "no table\n\n"}}
    head, _, *rows = figures.ratios.all_ratios(results).split("\n")
    assert head == "| lesson / its peer | one host | one host, slowed | hosts, 1 Gbit/s each |"
    assert rows == [
        "| ddp.py, 4 ranks, --accum 2 / torch DDP |  | **1.03 (1.01 to 1.10)** |  |",
        "| zero3.py / FSDP2, explicit prefetch | 1.04 (0.91 to 1.12), 20 % |  | 0.60 (0.59 to 0.61): FSDP2 |",
        "| zero3.py / FSDP2, no reshard | 0.86 (0.86 to 0.92), 20 % |  |  |",
    ]
    assert figures.ratios.slower(results).split("\n")[2:] == rows[:2]


# ---- code ----


def test_a_row_is_stale_once_a_statement_that_it_measured_has_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    zero3 = (ROOT / "zero3.py").read_text()
    (tmp_path / "ddp.py").write_text((ROOT / "ddp.py").read_text())
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/ledger.py").touch()
    row = figures.Row("zero", "some", "", "zero3", "torchrun --nproc_per_node=4 tools/ledger.py ddp.py")

    def reason(source, **changes):
        (tmp_path / "zero3.py").write_text(source)
        return figures.stale(row._replace(**changes), result)

    (tmp_path / "zero3.py").write_text(zero3)
    result = {"command": row.command, "commit": "abc1234", "hash": figures.hash_of(row)}
    statement = "        dist.all_reduce(squares)\n"
    assert zero3.count(statement) == 1
    words = re.sub(r'^"""', '"""More words. ', zero3).replace(statement, f"{statement}\n        # why\n")
    assert not reason(zero3) and not reason(words)
    toy = "# ==== end of the toy model"
    assert not reason(zero3.replace(toy, f"SIZE = 1\n{toy}"))
    assert reason(zero3.replace(statement, "")).endswith("git diff abc1234 -- ddp.py zero3.py")
    assert reason(zero3, command="python tools/ledger.py ddp.py") == "its command has changed"
    result["hash"] = ""
    assert reason(zero3) == "typed in"
    inside, after = "if a:\n    b()\n    c()\n", "if a:\n    b()\nc()\n"
    assert figures.statements(inside) != figures.statements(after)


# ---- commands ----


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A page with two blocks, one of them old."""
    rows = figures.rows_of("a | old |\n    echo 2 |\n    tr 2 3\n\na | link | root\n    echo 4\n")
    monkeypatch.setattr(figures, "ROWS", rows)
    monkeypatch.setattr(figures, "VIEWS", {})
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "JSON", tmp_path / "figures.json")
    monkeypatch.setattr(figures, "pages", lambda: [tmp_path / "a.md"])
    blocks = [f"<!-- figures: {row.name} -->\n<!-- end -->\n" for row in rows]
    (tmp_path / "a.md").write_text("Before.\n\n" + "\n".join(blocks))
    return tmp_path


def test_a_command_fills_its_block_and_a_failed_one_changes_nothing(checkout, monkeypatch, capfd):
    assert figures.main(["old"]) == 0
    text, (result,) = (checkout / "a.md").read_text(), figures.read().values()
    assert text.startswith("Before.\n\n<!-- figures: old -->\n`echo 2 | tr 2 3` | 20")
    assert "\n```\n3\n```\n<!-- end -->" in text and result["torch"] in text and result["commit"] in text
    monkeypatch.setattr(figures, "ROWS", [figures.ROWS[0]._replace(command="echo 5; exit 3")])
    assert figures.main([]) == 1 and (checkout / "a.md").read_text() == text
    assert "exit code 3" in capfd.readouterr().err


def test_an_ordinary_user_skips_what_needs_root_and_keeps_its_block(checkout, monkeypatch, capsys):
    monkeypatch.setattr(figures.os, "geteuid", lambda: 1000)
    before = (checkout / "a.md").read_text()
    assert figures.main(["link"]) == 0
    assert capsys.readouterr().out == "a: link: skipped, needs root\n"
    assert (checkout / "a.md").read_text() == before and not figures.read()


def test_lists_name_minutes_and_what_is_stale(checkout, capsys):
    result = {"command": "echo 3", "hash": "1", "minutes": 2.54}
    (checkout / "figures.json").write_text(json.dumps({"old": result}))
    assert figures.main(["--list"]) == 0
    old, link = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"a +old +2\.5 min +its command has changed", old)
    assert re.fullmatch(r"a +link +\? min +root +has never run", link)
    assert figures.main(["--stale"]) == 0
    assert capsys.readouterr().out.startswith("stale: a: old: its command has changed\n")
    assert figures.main(["--lists"]) == 2
    with pytest.raises(SystemExit, match="2"):
        figures.main(["nope"])
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["pages.py"] * 2


# ---- README's sentences ----


NUMBERS = {  # in them, by where they are from: a block, gpu.json, or why no command printed them
    "ddp-host": "1.02 0.98 1.11",
    "pipeline-host": "0.96 0.85 1.00 0.99 1.12",
    "zero-host": "0.82 0.76 0.88 0.86 0.81 0.89 0.90 0.92",
    "zero-link": "0.55 0.53 0.57 0.58 0.54 0.61",
    "gpu.json": "0.95 0.99 1.00 355",
    "a table of a page, which test_readme.py compares": "12 15 313",
    "counted by test_readme.py": "45 82 340",
    "single.py --size gpt2 on a CPU, timed by hand": "2.3 36 16 1024 2 2026-11-26",
    "sizes of packages, by hand": "5 1.3",
    "the toy's shape: of a block, of a tensor": "12 0.07",
    "versions": "3.11 2.11.0 2.13.0 2.15.0",
    "formulas": "16/N 4/N 2/N",
    "what a command is told": "4 1",
}


def test_each_number_in_readmes_sentences_was_measured_or_has_a_reason():
    code = r"^```.*?^```$|`[^`]*`|\]\([^)]*\)|<!--.*?-->|^\|.*?$"  # and tables
    prose = re.sub(code, "", PAGES["README"], flags=re.M | re.S)
    found = set(re.findall(r"(?<![\w.-])\d+(?:[.-]\d+)*(?:/N)?(?![\w/-])", prose))
    assert found == set(" ".join(NUMBERS.values()).split()), "add a number with its block, or a reason"
    models = json.loads((ROOT / "docs/results/gpu.json").read_text())["models"].values()
    measured = {name: re.findall(r"\d+\.\d+", result["text"]) for name, result in RESULTS.items()}
    measured["gpu.json"] = [row[key] for rows in models for row in rows for key in ("ratio", "ms")]
    for source in NUMBERS.keys() & measured.keys():
        for number in NUMBERS[source].split():
            digits = len(number.partition(".")[2])
            rounded = {f"{float(value):.{digits}f}" for value in measured[source]}
            assert number in rounded, f"{source} has no {number}"


def test_readme_says_faster_or_slower_only_where_all_rounds_do():
    speeds = PAGES["README"].partition("## How fast it is")[2].partition("\n## ")[0]
    for line in re.findall(r"^- .*(?:\n  .*)*", speeds, re.M):
        ranges = [tuple(map(float, found)) for found in re.findall(r"\(([\d.]+) to ([\d.]+)", line)]
        both = [least < 1 < most for least, most in ranges]
        assert ranges and sum(both) == line.count("equal"), f"equal, or not? {line}"
