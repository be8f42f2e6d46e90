"""What MkDocs doesn't do by itself: reference pages from the code, and files of the repository that pages link to.

A link out of docs/ (`../data/apart/all.png`, `../examples/cartpole.py`) is right on GitHub; the site gets that file at
the same path below its own root. Nothing is asked from the network, neither here nor by the pages.
"""

import argparse
import ast
import html
import inspect
import json
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

import manyfold
from manyfold import cli
from tasks import study

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()(?!\w+://|#)([^)\s#]+)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.DOTALL | re.MULTILINE)


# --- reference pages --------------------------------------------------------------------------------------------------


def api() -> str:
    """Every public name, in the groups of manyfold's own docstring, with its signature and its docstring."""
    groups: list[list[str]] = [["", ""]]  # names, what they are
    for line in (manyfold.__doc__ or "").split("\n\n")[2].splitlines():
        names, _, about = line.strip().partition("    ") if line[4] != " " else ("", "", line.strip())
        if names and groups[-1][1]:
            groups.append(["", ""])
        groups[-1] = [f"{one} {more.strip()}".strip() for one, more in zip(groups[-1], (names, about), strict=True)]
    lines = ["# Python", "", "`import manyfold as mf`. What is not on this page may change without notice.", ""]
    for names, about in groups:
        lines += [f"## {about[0].upper()}{about[1:]}", ""]
        listed = (name for name in re.findall(r"\w+", names) if name in manyfold.__all__)
        lines += [line for name in listed for line in entry(name, getattr(manyfold, name))]
    return "\n".join(lines)


def entry(name: str, thing: Any) -> Iterator[str]:
    """A public name's part of the page."""
    yield from (f"### `mf.{name}`", "")
    if isinstance(thing, ModuleType):
        yield from prose(inspect.getdoc(thing))
        members = {
            key: value for key, value in vars(thing).items() if getattr(value, "__module__", "") == thing.__name__
        }
    elif isinstance(thing, type):
        fields = class_fields(thing)
        yield from code(name, fields) if fields else ()
        yield from prose(inspect.getdoc(thing))
        members = dict(vars(thing))
    elif callable(thing):
        yield from code(name, function(thing))
        yield from prose(inspect.getdoc(thing))
        return
    else:  # a registry
        yield from ("Entries: " + ", ".join(f"`{key}`" for key in thing) + ".", "")
        return
    methods = []
    for key, value in members.items():
        value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        about = "" if key.startswith("_") else inspect.getdoc(value) or ""
        if inspect.isfunction(value) and about:
            shown = "" if isinstance(members[key], property) else function(value)
            methods.append(f"- `{key}{shown}`: {' '.join(escaped(about.split(chr(10) * 2)[0]).split())}")
    yield from (
        ("**Functions**" if isinstance(thing, ModuleType) else "**Methods**", "", *methods, "") if methods else ()
    )


def tree(thing: Any) -> Any:
    """The syntax of a function or class, as its author wrote it."""
    return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]


def function(thing: Any) -> str:
    node = tree(thing)
    node.args.args = [x for x in node.args.args if x.arg not in ("self", "cls")]
    text = f"({ast.unparse(node.args)})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")
    return re.sub(r"'([A-Z]\w*)'", r"\1", text)  # names that are defined below


def class_fields(thing: type) -> str:
    """Arguments of `__init__`, or a dataclass's fields."""
    if "__init__" in vars(thing) and "__dataclass_fields__" not in vars(thing):
        return function(vars(thing)["__init__"]).removesuffix(" -> None")
    if "__dataclass_fields__" not in vars(thing) and not hasattr(thing, "_fields"):
        return ""
    fields = [x for x in tree(thing).body if isinstance(x, ast.AnnAssign)]
    return "(" + ", ".join(ast.unparse(x) for x in fields if "ClassVar" not in ast.unparse(x)) + ")"


def code(name: str, arguments: str) -> Iterator[str]:
    """`name(...)`, an argument on each line where they are many."""
    if len(name + arguments) > 100:
        depth, parts, end = 0, [""], arguments.rfind(")")
        for letter in arguments[1:end]:
            depth += (letter in "([{") - (letter in ")]}")
            parts[-1] += letter
            if letter == "," and not depth:
                parts.append("")
        arguments = "".join(("(\n", *(f"    {part.strip()}\n" for part in parts), arguments[end:]))
    yield from ("```py", name + arguments, "```", "")


def escaped(text: str) -> str:
    """Outside of `code`, nothing is Markdown."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(x if i % 2 else re.sub(r"([*_\[\]|])", r"\\\1", html.escape(x, False)) for i, x in enumerate(parts))


def prose(text: str | None) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, arguments as a list, what is indented as it stands."""
    for block in (text or "").split("\n\n"):
        head, *rest = block.splitlines() or [""]
        if head.rstrip(":") in ("Args", "Attributes", "Returns", "Raises", "Yields"):
            yield from (f"**{head.rstrip(':')}**", "")
            items = re.split(r"\n(?! )", textwrap.dedent("\n".join(rest)))
            for item in items:  # "name: what it is", or a sentence
                named, _, about = item.partition(": ")
                plain = head.startswith(("Args", "Attr")) and about
                yield f"- `{named}`: {escaped(about)}" if plain else f"- {escaped(item)}"
        elif head.startswith("    "):
            yield from ("```", textwrap.dedent(block), "```")
        else:
            yield escaped(block)
        yield ""


def commands() -> str:
    """What every command says with --help."""
    lines = ["# Commands", "", "What each of them says with `--help`."]
    for name, parser in (*parsers("manyfold", cli.parser()), *parsers("manyfold study", study.parser())):
        lines += ["", f"## {name}", "", "```", parser.format_help().rstrip(), "```"]
    return "\n".join(lines)


def parsers(name: str, parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """A command and those below it."""
    parser.formatter_class = wide(parser.formatter_class)
    below = [x for x in parser._actions if isinstance(x, argparse._SubParsersAction)]
    if name != "manyfold study":
        yield name, parser
    for action in below:
        for key, child in action.choices.items():
            if key != "study":  # its own parser knows more
                yield from parsers(f"{name} {key}", child)


def wide(kind: Any) -> Any:
    """The same at one width, wherever it is built."""
    return lambda prog: kind(prog, width=100)


def parameters() -> str:
    about = """# params.yaml

Every parameter of [the pipeline](../pipeline.md), as the file in the repository has it. The sections `targets` to
`evaluate` are the defaults of the stages of the same names; a study under `studies` may override any of them in its own
section of that name. `manyfold study new` adds a study.
"""
    return f"{about}\n```yaml\n{(ROOT / 'params.yaml').read_text()}```\n"


MENU = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = {"reference/api.md": api, "reference/commands.md": commands, "reference/params.md": parameters}


# --- files of the repository ------------------------------------------------------------------------------------------


def outside(page: str, text: str) -> Iterator[str]:
    """Paths, from the repository's root, of what a page links to and what docs/ doesn't have."""
    for link in LINK.findall(CODE.sub("", text)):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        if not path.startswith("docs/") and (ROOT / path).is_file():
            yield path


def placed(path: str) -> str:
    """A file of the repository on the site: code is shown on a page, and a page README would be the home page."""
    return "readme.md" if path == "README.md" else re.sub(r"\.py$", ".md", path)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    pages = {f"docs/{x.src_uri}": x.content_string for x in files if x.is_documentation_page()}
    pages |= {name: (ROOT / name).read_text() for name in MENU}
    wanted = {path for page, text in pages.items() for path in outside(page, text)}
    for path in sorted({*wanted, *MENU}):
        if path.endswith((".py", ".md")):
            text = (ROOT / path).read_text()
            if not text.startswith("# "):
                text = f"# {path}\n\n" + (f"```python\n{text}```\n" if path.endswith(".py") else text)
            file = File.generated(config, placed(path), content=text)
        else:
            file = File.generated(config, path, abs_src_path=str(ROOT / path))
        if path not in MENU:
            file.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between docs/ and the rest of the repository, which are one folder on the site."""
    name = page.file.src_uri
    ours = name in PAGES or (ROOT / "docs" / name).exists()
    home = f"docs/{name}" if ours else next((path for path in MENU if placed(path) == name), name)

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), link[0]))
        return posixpath.relpath(placed(path.removeprefix("docs/")), posixpath.dirname(name) or ".")

    parts = CODE.split(drawn(markdown))
    return "".join(part if i % 2 else LINK.sub(moved, part) for i, part in enumerate(parts))


def drawn(markdown: str) -> str:
    """A flowchart of Mermaid, which needs a script, as a table: what each node is, and what it comes from."""

    def table(found: re.Match[str]) -> str:
        nodes = re.findall(r'(\w+)\["\w+<br>(.*?)"\]', found[1])
        edges = re.findall(r"(\w+) --> (\w+)", found[1])
        rows = [f"| `{x}` | {about} | {', '.join(a for a, b in edges if b == x)} |" for x, about in nodes]
        return "\n".join(("| stage | gives | from |", "|---|---|---|", *rows))

    return re.sub(r"^```mermaid\n(.*?)^```$", table, markdown, flags=re.DOTALL | re.MULTILINE)


@event_priority(-100)  # after MkDocs' own search, whose workers can't run from files
def on_post_build(config: MkDocsConfig) -> None:
    folder = Path(config.site_dir) / "search"
    index = json.loads((folder / "search_index.json").read_text())["docs"]
    for path in folder.iterdir():
        path.unlink()
    (folder / "index.js").write_text(f"const search_index = {json.dumps(index)};\n")
    (folder / "main.js").write_text((ROOT / "docs" / "assets" / "search.js").read_text())
