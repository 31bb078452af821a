"""The lessons as pages that open from disk and from any static host.

    ./run.sh site
    python site/book.py FOLDER    (default: docs/site)

Text, code and numbers are the repository's own: of the lessons, README and docs/results, and what
build_schedule(), bubble_rate() and plan.py compute. Templates, style and the explorers' script are in
site/pages. Explorers, films, search and questions need JavaScript, text and code do not.
"""

import ast
import difflib
import importlib
import json
import re
import shutil
import sys
from collections import defaultdict
from functools import cache, partial
from html import unescape
from itertools import groupby, pairwise, product
from pathlib import Path

import jinja2
import markdown
import markdown.extensions.toc
from figures import starts
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = str(ROOT), str(ROOT / "tools")
from bubble import bubble_rate  # noqa: E402
from formulas import plain_letters  # noqa: E402
from letters import bytes_of, evaluate, letters_of  # noqa: E402

README = (ROOT / "README.md").read_text()
RUN, SPEED = ((ROOT / f"docs/results/{name}.md").read_text() for name in ("run", "speed"))
PAGES, FILMS = ROOT / "site/pages", ROOT / "docs/films"
SCHEDULES = {"pipeline": ("naive", "gpipe", "1f1b", "interleaved"), "zero_bubble": ("zb-h1", "zb-h2")}
SCHEDULES["pipeline_v"] = ("zb-v",)
STAGES, MICROBATCHES, CHUNKS = (2, 3, 4, 6, 8), (1, 2, 3, 4, 6, 8, 12, 16, 24), (1, 2, 3, 4)
MODELS = ("125m", "350m", "1.3b", "2.7b", "7.5b", "13b", "30b", "70b", "175b", "405b", "1000b")
TEN = ["single", "ddp", "zero1", "zero2", "zero3"]  # the path of ten.html
GPUS = [2**i for i in range(13)]


def rows(pattern, text=README):
    """{first group: [the others]} of the lines that match."""
    return {name: rest for name, *rest in re.findall(f"^{pattern}$", text, re.M)}


LESSONS = rows(r"\| \[`(\w+)\.py`\]\S+ \| (.+) \|")  # in reading order: what each teaches
CHANGES = re.findall(r"^diff (\w+)\.py (\w+)\.py *#? ?(.*)$", README, re.M)  # [(old, new, why)]
MEASURED = rows(r"(\w+) +(\d+) +([\d.]+) +\S+" + r" +(\S+ / \S+|-)" * 5 + r" +([\d.]+)  .*", RUN)
PICTURES = rows(r"(\w+) +\| ([\w. ]+?) *\|(.*)", (PAGES / "pictures.txt").read_text())
DOCS = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
SHOWN = {figure: words for words, figure in re.findall(r"!\[(.*?)\]\((?:\.\./)?([\w-]+)\.svg\)", DOCS)}
PEERS = re.findall(r"^\| (\w+\.py.*?) \| (.+) \| ([\d.; ]+) \| ([\d.; ]*?) ?\|$", SPEED, re.M)
SENT = r"\b(dist\.(all_|broadcast|i?send|i?recv)|all_gather\(|reduce_scatter\(|collective\()"
SENDS = re.compile(f'(?!.*("sd"|getattr)).*{SENT}')  # in HTML; not in a docstring (sd)
OF_FILMS = r'<section class="film".*?</section>', r'<p class="legend film-legend".*?</p>'
CALLS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send", "broadcast", "reduce")


# ---- text ----


def linked(text):
    """Plain text as HTML, with links to the papers and the lessons that it names."""
    html = str(escape(text))
    html = re.sub(r"(?:arXiv\s)?\b(\d{4}\.\d{5})\b", r'<a href="https://arxiv.org/abs/\1">\g<0></a>', html)
    html = re.sub(rf"\b({'|'.join(LESSONS)})\.py\b", r'<a href="\1.html">\g<0></a>', html)
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", html))


def prose(source):
    """Markdown as HTML, with links to the site's pages and figures, and of each heading to itself."""
    toc = markdown.extensions.toc.TocExtension(permalink="#", permalink_title="link to this part")
    html = markdown.markdown(source, extensions=["tables", "fenced_code", toc])
    html = re.sub(r'href="(?:docs/|\.\./)?results/(\w+)\.md"', r'href="results-\1.html"', html)
    html = re.sub(r'href="(?:docs/|\.\./)?(\w+)\.md"', r'href="\1.html"', html)
    html = re.sub(r'href="(?:\.\./)?(\w+)\.py(#L\d+)?"', r'href="\1.html\2"', html)
    html = html.replace('href="../job.sbatch"', 'href="job.sbatch"')
    return Markup(re.sub(r'src="[^"]*?([\w-]+\.svg)"', r'src="\1"', html))


def sections(docstring):
    """(heading, remark, [(kind, lines)]) of each section of a lesson's docstring."""
    found = re.split(r"^(Idea|Timeline|Memory|Sent|Run|Left out)(.*)$", docstring, flags=re.M)[1:]
    for heading, remark, body in zip(found[::3], found[1::3], found[2::3]):
        lines = [line[4:] for line in body.strip("\n").split("\n")]
        blocks = [(name, list(own)) for name, own in groupby(lines, partial(kind, heading))]
        yield heading, remark.strip(), blocks


def kind(heading, line):
    if heading == "Run":
        return "verbatim"
    if line.count("|") > 2:
        return "timeline"
    if "  " not in line:
        return "prose"
    return "verbatim" if heading == "Timeline" else "table"


def timeline(lines):
    """(each column's percentage, [(label, [(text, how many columns)])]) of an ASCII timeline."""
    end = max(len(line.removesuffix("|")) for line in lines)
    bars = [sorted({end, *(match.start() for match in re.finditer(r"\|", line))}) for line in lines]
    edges = sorted(set().union(*bars))
    found = []
    for line, own in zip(lines, bars):
        cells = [(line[a + 1 : b].strip(), edges.index(b) - edges.index(a)) for a, b in pairwise(own)]
        found.append((line[: own[0]], cells))
    return [100 * (b - a) / (end - edges[0]) for a, b in pairwise(edges)], found


# ---- code ----


def code_lines(source):
    """A Python file's lines as HTML."""
    html = highlight(source, PythonLexer(stripnl=False), HtmlFormatter(nowrap=True))
    plain = r'<span class="(?:n|p|o|w|nn|nb|bp|fm|vm|ow|si|se|sa)">([^<]*)</span>'
    return re.sub(plain, r"\1", html).split("\n")[:-1]


def cut(source):
    """(title, first line, last line) of each part of a lesson's code, counted from 1."""
    lines = source.split("\n")
    _, imports, *rest = ast.parse(source).body
    technique = next(each.lineno for each in rest if not isinstance(each, ast.Import | ast.ImportFrom))
    while lines[technique - 2].startswith(("#", "@")):
        technique -= 1
    train = next(i for i, line in enumerate(lines, 1) if line.startswith("def train(config"))
    toy, end = (i for i, line in enumerate(lines, 1) if line.startswith("# ===="))
    begins = {"Imports": imports.lineno, "The technique": technique, "Training": train}
    begins |= {"The toy model: the same lines in every lesson": toy, "The rest": end + 1}
    for (title, begin), (_, after) in pairwise([*begins.items(), ("", len(lines))]):
        numbers = [i for i in range(begin, after) if lines[i - 1]]  # but empty ones before and after
        yield title, numbers[0], numbers[-1]


def changed_words(old, new):
    """Of two texts the sets of characters that stand in words of one alone, if most words are in both."""
    words = [[match.span() for match in re.finditer(r"\w+|[^\w\s]", text)] for text in (old, new)]
    given = [[text[a:b] for a, b in spans] for text, spans in zip((old, new), words)]
    matcher = difflib.SequenceMatcher(None, *given, autojunk=False)
    found = set(), set()
    if matcher.ratio() > 0.5:
        for tag, a, b, c, d in matcher.get_opcodes():
            for own, spans in zip(found, (words[0][a:b], words[1][c:d])):
                if tag != "equal" and spans:
                    own.update(range(spans[0][0], spans[-1][1]))
    return found


def marked(lines, changed, place=0):
    """Lines of HTML in which these characters of their text are marked."""
    for html in lines:
        pieces = []
        for piece in re.findall(r"<[^>]*>|&\w+;|&#\d+;|.", html):
            if piece[0] == "<":
                pieces.append(piece)
            else:
                pieces.append(f"<mark>{piece}</mark>" if place in changed else piece)
                place += len(unescape(piece))
        place += 1  # the line's end
        yield "".join(pieces).replace("</mark><mark>", "")


def changes(old, new):
    """[(kind, lines of old, lines of new)] of two pieces, as (text, HTML); kind: changed, equal, folded."""
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old[0], new[0], autojunk=False).get_opcodes():
        if tag != "equal":
            words = changed_words("\n".join(old[0][a:b]), "\n".join(new[0][c:d]))
            yield "changed", list(marked(old[1][a:b], words[0])), list(marked(new[1][c:d], words[1]))
            continue
        head, tail = min(b, a + 2 * (a > 0)), max(a, b - 2 * (b < len(old[0])))
        for how, i, j in (("equal", a, head), ("folded", head, tail), ("equal", max(head, tail), b)):
            if i < j:
                yield how if j - i > 4 else "equal", old[1][i:j], new[1][c + i - a : c + j - a]


# ---- explorers ----


def explored(lesson, name, stages, microbatches, chunks):
    """What the schedule explorer shows, or what is wrong. A rank: its actions, and -3 for 3 units idle."""
    try:
        schedule = lesson.build_schedule(name, stages, microbatches, *[chunks] * (chunks > 1))
    except AssertionError as error:
        return str(error)
    last = schedule[0][-1].op  # which frees a microbatch's activations
    parts = len({action.stage for action in schedule[0]})  # of a rank's layers
    length = {"F": 1 / parts, "B": (1 if last == "W" else 2) / parts, "W": 1 / parts}
    ranks, in_flight = [], []
    for row in starts(schedule, lesson.NEXT, length):
        words, now, alive = [], 0, [0]
        for begin, (op, stage, k) in row:
            words += [f"{now - begin:.6g}"] * (begin - now > 1e-9) + [f"{op}{k}.{stage // stages}"]
            now = begin + length[op]
            alive.append(alive[-1] + (op == "F") - (op == last))
        ranks.append(" ".join(words).replace(".0 ", " ").removesuffix(".0"))
        in_flight.append(max(alive))
    return {"idle": round(bubble_rate(schedule, 1, 1, 1), 6), "inFlight": in_flight, "ranks": ranks}


def explorer_data():
    """What the explorers show, as a script: {"1f1b 4 8 1": explored()}, {"7.5b 64": bytes of each stage}."""
    schedules, memory, plan = {}, {}, importlib.import_module("plan")
    for file, names in SCHEDULES.items():
        lesson = importlib.import_module(file)
        for choice in product(names, STAGES, MICROBATCHES, CHUNKS):
            if (choice[0] == "interleaved") == (choice[-1] > 1):
                schedules[" ".join(map(str, choice))] = explored(lesson, *choice)
    for model, gpus in product(MODELS, GPUS):
        letters = plain_letters(plan.number(model), gpus)
        rows = [list(bytes_of(lesson, letters).values()) for lesson in ("ddp", "zero1", "zero2", "zero3")]
        memory[f"{model} {gpus}"] = [[*row[:3], sum(row[3:])] for row in rows]
    return f"const SCHEDULES = {json.dumps(schedules)}\nconst MEMORY = {json.dumps(memory)}\n"


# ---- films ----


@cache
def film_of(name):
    """docs/films/NAME.json with the numbers that its lines have today."""
    path = FILMS / f"{name}.json"
    if not path.exists():
        sys.exit(f"{path} is not there: ./run.sh films {name}")
    film = json.loads(path.read_text())
    numbers = defaultdict(list)  # {line without its comment: where it stands}
    for number, text in enumerate((ROOT / f"{name}.py").read_text().split("\n"), 1):
        numbers[bare(text)].append(number)
    numbers[""] = [0]
    for _, text in film["lines"]:
        if bare(text) not in numbers:
            sys.exit(f"{path.name}: {name}.py has no line `{text}` any more: ./run.sh films {name}")
    alone = [(old, *numbers[bare(text)]) for old, text in film["lines"] if len(numbers[bare(text)]) == 1]
    for row in film["lines"]:  # of several equal ones that which has moved as its neighbour has
        old, new = min(alone, key=lambda pair: abs(pair[0] - row[0]))
        row[0] = min(numbers[bare(row[1])], key=lambda number: abs(number - new + old - row[0]))
    return film


def bare(line):
    return re.sub(r"  # [^\"']*$", "", line).strip()


# ---- pages ----


def lesson_page(name):
    """What lesson.html needs to know of a lesson."""
    source = (ROOT / f"{name}.py").read_text()
    tree = ast.parse(source)
    says, _, docstring = ast.get_docstring(tree).partition("\n")
    defined = [each for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    html = code_lines(source)
    sends = [i for i, line in enumerate(html, 1) if SENDS.match(line)]
    order = sorted(sends, key=lambda i: ("grad" in html[i - 1], -i))  # the first one, if of gradients, wins
    calls = {}
    for i, what in product(order, CALLS):
        if re.search(what.replace("-", "_") + "(?!er|_o)", html[i - 1]):
            calls[what] = i
    return {
        "says": says,
        "sections": sections(docstring),
        "lines": html,
        "parts": list(cut(source)),
        "sends": sends,
        "calls": calls,
        "outline": [(each.name, ast.get_docstring(each) or "", each.lineno) for each in defined],
    }


def changes_page(old, new):
    """What changes.html needs to know of two neighbours."""
    pieces = []
    for source in ((ROOT / f"{name}.py").read_text() for name in (old, new)):
        end = ast.parse(source).body[0].end_lineno  # of the docstring
        lines = list(zip(source.split("\n")[:-1], code_lines(source)))
        pieces.append([list(zip(*part)) for part in (lines[end:], lines[:end])])
    code, docstring = (list(changes(*pair)) for pair in zip(*pieces))
    gone, come = (sum(len(row[i]) for row in code if row[0] == "changed") for i in (1, 2))
    return {"code": code, "docstring": docstring, "gone": gone, "come": come}


def exercises():
    """The path of learn.py, in Markdown."""
    learn = importlib.import_module("learn")
    usage = learn.__doc__.split("\n\n")
    table = ["| exercise | minutes | what is missing | hint |", "|---|---|---|---|"]
    for name, what, minutes, hint in learn.read_path():
        lesson, _ = learn.lesson_of(name)
        table.append(f"| `fill {name}` | {minutes} | `{what}` in [{lesson}.py]({lesson}.py) | {hint} |")
    return "\n\n".join(["# Do it yourself", usage[0], f"```\n{usage[1]}\n```", "\n".join(table)])


def megabytes(name, formula):
    """What a formula is on 4 ranks, with the flags of a lesson's film."""
    return evaluate(formula, letters_of_film(name)) / 1e6


def parameters(name):
    return f"{letters_of_film(name)['P'] / 1e6:.2f} million"


def letters_of_film(name):
    lesson, film = importlib.import_module(name), film_of(name)
    config = lesson.parse(film["flags"].split())
    config.shares = film["ranks"]
    return letters_of(lesson, config, film["ranks"], "gloo")


def source_of(name, part):
    """The lines of HTML of a lesson's function or method."""
    source = (ROOT / f"{name}.py").read_text()
    defined = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    node = next(node for node in defined if node.name == part)
    return code_lines(source)[node.lineno - 1 : node.end_lineno]


def search_index(pages):
    """[(address, title of the page, heading, text)] of each part of the pages, {name: HTML}."""
    for name, html in pages.items():
        title = unescape(re.search("<title>(.*?)(?: \\| rankzero)?</title>", html)[1])
        main = html[html.index("</nav>") :]
        for ends in r'<a class="headerlink".*?</a>', r"<(pre|svg|form).*?</\1>", *OF_FILMS:
            main = re.sub(f"(?s){ends}", "", main)
        _, *parts = re.split(r"(?s)<h[1-3](.*?)</h[1-3]>", main)
        for head, body in zip(parts[::2], parts[1::2]):
            place = re.match(r' id="([^"]*)"', head)
            words = unescape(re.sub(r"<[^>]*>", "", "<h" + head)).strip("# \n")
            text = " ".join(unescape(re.sub(r"<[^>]*>", " ", body)).split())
            yield f"{name}.html" + (f"#{place[1]}" if place else ""), title, words or title, text


def build(target):
    """Write the site to a folder."""
    target.mkdir(parents=True, exist_ok=True)
    loader = jinja2.FileSystemLoader(PAGES)
    templates = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.globals |= globals()

    pages = {}

    def write(page, template, title, **content):
        pages[page] = templates.get_template(template).render(page=page, title=title, **content)
        (target / f"{page}.html").write_text(pages[page])

    write("index", "index.html", "rankzero", intro=prose("\n\n".join(README.split("\n\n")[1:3])))
    write("ten", "ten.html", "Ten minutes")
    write("explore", "explore.html", "Explore")
    results = {path.stem: path.read_text() for path in sorted((ROOT / "docs/results").glob("*.md"))}
    texts = {"readme": README, "learn": exercises()}
    pages_of_docs = ("use", "formulas", "trouble", "cluster", "one_gpu")
    texts |= {name: (ROOT / f"docs/{name}.md").read_text() for name in pages_of_docs}
    texts |= {f"results-{name}": text for name, text in results.items()}
    titles = {name: text.split("\n")[0].lstrip("# ") for name, text in texts.items()} | {"readme": "README"}
    measured = {name: title for name, title in titles.items() if name.startswith("results-")}
    write("results", "results.html", "Measured", titles=measured)
    order = [None, *texts, None]
    for name, before, after in zip(texts, order, order[2:]):
        more = {"before": before, "after": after, "titles": titles}
        write(name, "text.html", titles[name], text=prose(texts[name]), **more)
    for name in LESSONS:
        own = [each for each, text in results.items() if re.search(rf"^(# .*\b|## ){name}\.py", text, re.M)]
        write(name, "lesson.html", f"{name}.py", results=own, titles=titles, **lesson_page(name))
    for old, new, why in CHANGES:
        content = changes_page(old, new)
        write(f"{old}-{new}", "changes.html", f"{old} to {new}", old=old, new=new, why=why, **content)
    (target / "explore-data.js").write_text(explorer_data())
    index = json.dumps(list(search_index(pages)), ensure_ascii=False, separators=(",", ":"))
    (target / "search-index.js").write_text(f"window.INDEX = {index};\n")
    for name in LESSONS:
        film = json.dumps(film_of(name), separators=(",", ":"))
        (target / f"film-{name}.js").write_text(f"(window.FILMS ??= {{}}).{name} = {film};\n")
    files = [PAGES / "style.css", ROOT / "job.sbatch", *PAGES.glob("*.js"), *(ROOT / "docs").glob("*.svg")]
    for path in files:
        shutil.copy(path, target)


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/site")
