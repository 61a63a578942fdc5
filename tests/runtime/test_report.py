"""Reports: three files that agree with one another, one page that needs nothing else."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvrun import compare as comparison
from kvrun.cli import app
from kvrun.console import exit_status
from kvrun.errors import KvError
from kvrun.report import LayerReport, check_folder, read_diagnosis, write_report
from kvrun.report.charts import NARROW, WIDE, by_position, frontier, heat_map, pareto, points_of
from kvrun.report.svg import Box, Scale, place_label
from kvrun.results import ResultRow

HEADER = {"Model": ["a<b>.gguf", "fingerprint 0123"], "Text": "text & more.txt"}


def row(name: str, bits: float, kld: float, *, engine: str = "kvrun", **facts: Any) -> ResultRow:
    return ResultRow(
        engine, name, name, n_ctx=512, n_scored=255, ppl=20.0, kld_mean=kld, kld_mean_se=kld / 20, kld_p99=8 * kld,
        same_top=0.9, bits_per_value=bits, kv_bytes=1 << 20, tokens_per_s=100.0, model="a.gguf", text="t.txt",
        text_sha256="ab" * 32, **facts,
    )  # fmt: skip


ROWS = [
    row("f16", 16.0, 1e-13),
    row("kv4", 4.5, 0.05),
    row("kv4", 5.3, 0.04, sinks=4, window=32),
    row("kv3", 3.5, 0.3),
    row("kv1", 9.0, 5.0, control=True),
    row("q4_0", 4.5, 0.045, engine="llama.cpp", rotation="on"),
    row("q8_0", 8.5, 0.001, engine="llama.cpp"),
    ResultRow("llama.cpp", "q5_0", "q5_0", error="aborted: <head size 80> is not divisible by 32"),
]
POSITIONS = {"kv4": [(256.0, 0.04), (400.0, 0.06)], "kv3": [(256.0, 0.2), (400.0, 0.4)]}


def diagnosis(**changes: Any) -> dict[str, Any]:
    parts = [
        {"layer": il, "side": side, "head": head, "kld_only": 0.01 * (il + 1), "kld_rest": 0.1, "error": 0.1}
        for il in range(3)
        for side in "kv"
        for head in (0, 1)
    ]
    found = [{"sentence": "Keys of layer 0 stand out."}]
    return {
        "format": "kvconv.diagnosis",
        "cache": "kv4/kv4",
        "kld_all": 0.2,
        "parts": parts,
        "findings": found,
    } | changes


class Page(HTMLParser):
    """Tags and text of a page; closing tags must match."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self, content: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def drawings(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_three_files_that_agree(tmp_path: Path) -> None:
    layers = LayerReport(diagnosis())
    written = write_report(ROWS, HEADER, tmp_path / "out", positions=POSITIONS, layers=layers)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["report.html", "report.json", "report.md"]
    as_json, as_markdown, as_html = (path.read_text(encoding="utf-8") for path in written)

    content = json.loads(as_json)
    assert [ResultRow.from_dict(r) for r in content["rows"]] == ROWS
    assert content["header"] == HEADER and content["positions"]["kv3"] == [[256.0, 0.2], [400.0, 0.4]]
    assert content["layers"]["kld_all"] == 0.2

    page = Page(as_html)
    assert page.open == []
    text = " ".join(page.words)
    for needed in ("a<b>.gguf", "text & more.txt", "<head size 80>", "Keys of layer 0 stand out.", "4 sinks + last 32"):
        assert needed in text
    for needed in ("fingerprint 0123", "0.0450", "<head size 80>", "Keys of layer 0", "0.3000"):
        assert needed in as_markdown
    # One table row for each result and one for the failure, below two headings.
    assert sum(tag == "tr" for tag, _ in page.tags) == len(ROWS) + 2
    assert len(drawings(as_html)) == 2 * (1 + 1 + 2)


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    *_, html = write_report(ROWS, HEADER, tmp_path / "out", positions=POSITIONS, layers=LayerReport(diagnosis()))
    page = Page(html.read_text(encoding="utf-8"))
    assert not {"script", "link", "img", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert [a for _, attrs in page.tags for a in attrs if a in ("src", "href", "onload", "onclick", "style")] == []
    style = html.read_text(encoding="utf-8").split("<style>")[1].split("</style>")[0]
    assert "url(" not in style and "@import" not in style
    assert "prefers-color-scheme: dark" in style


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_can_be_read_on_the_page_in_light_and_dark(tmp_path: Path) -> None:
    """WCAG 2 AA: 4.5 to 1 for everything that is written in a colour."""
    *_, html = write_report(ROWS, HEADER, tmp_path / "out")
    for block in re.findall(r":root \{(.*?)\}", html.read_text(encoding="utf-8"), re.DOTALL):
        colours = dict(re.findall(r"--([\w]+): (#[0-9a-f]{6})", block))
        page = _luminance(colours["page"])
        for name in ("ink", "soft", "ours", "theirs", "bad", "c0", "c1", "c2", "c3", "c4", "c5"):
            low, high = sorted((page, _luminance(colours[name])))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (name, colours[name])


def test_a_report_of_nothing_but_failures(tmp_path: Path) -> None:
    *_, html = write_report([ROWS[-1]], HEADER, tmp_path / "out")
    assert "No row has figures to draw" in html.read_text(encoding="utf-8")


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(KvError, match="exists"):
        write_report(ROWS, HEADER, folder)
    assert [p.name for p in folder.iterdir()] == ["mine.txt"]
    write_report(ROWS, HEADER, folder, force=True)
    assert (folder / "mine.txt").read_text() == "mine" and (folder / "report.html").exists()
    with pytest.raises(KvError, match="is a file"):
        check_folder(folder / "mine.txt", force=True)
    with pytest.raises(KvError, match="does not exist"):
        check_folder(tmp_path / "no" / "where")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"format": "other"}',
        json.dumps(diagnosis(parts=[{"layer": 0}])),
        json.dumps(diagnosis(findings=1)),
        json.dumps(diagnosis(parts=[diagnosis()["parts"][0] | {"layer": 10**12}])),
    ],
)
def test_a_file_that_is_no_diagnosis(content: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(KvError, match="kvconv diagnose"):
        read_diagnosis(tmp_path / "d.json")


def test_what_is_drawn() -> None:
    points = points_of(ROWS)
    assert [p.label for p in points] == ["kv4", "kv4 4+32", "kv3", "q4_0 rotated", "q8_0"]
    assert [p.label for p in frontier([p for p in points if p.ours])] == ["kv3", "kv4", "kv4 4+32"]
    for width in (WIDE, NARROW):
        (svg,) = drawings(pareto(ROWS, width))
        texts = [e for e in svg.iter() if e.tag.endswith("text")]
        assert {p.label for p in points} <= {e.text for e in texts}
        for e in texts:
            assert 0 <= float(e.attrib["x"]) <= width
    assert pareto([]) == "" and by_position({}) == "" and heat_map([], [], "nothing") == ""


def test_scales() -> None:
    scale = Scale(0.001, 1.0, 100, 0, log=True)
    assert scale(0.001) == pytest.approx(100) and scale(1.0) == pytest.approx(0)
    assert scale(0.0316227766) == pytest.approx(50)
    assert (
        scale.ticks() == pytest.approx([0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0])
        or len(scale.ticks()) >= 4
    )
    assert Scale(3.1, 8.9, 0, 1).ticks() == [4, 5, 6, 7, 8]


def test_labels_do_not_cover_one_another() -> None:
    taken: list[Box] = []
    frame = Box(0, 0, 600, 400)
    for _ in range(8):
        place_label(300, 200, "q4_0 rotated", taken, frame)
    assert max(a.overlap(b) for i, a in enumerate(taken) for b in taken[:i]) < 0.25 * 12 * 100


def test_a_darker_field_is_a_larger_value() -> None:
    maps = LayerReport(diagnosis()).heat_maps()
    (svg,) = drawings(maps[0])
    fields = [e for e in svg.iter() if e.tag.endswith("rect") and len(e)]
    shades = {e[0].text.split(":")[0]: float(e.attrib["fill-opacity"]) for e in fields if e[0].text}
    assert len(fields) == 12
    assert shades["layer 0, keys 0"] < shades["layer 1, keys 0"] < shades["layer 2, keys 0"] == 1.0


def kvrun(*arguments: object) -> int:
    return exit_status(app, [str(a) for a in arguments], prog="kvrun")


def test_compare_writes_a_report(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(comparison, "LLAMA_SETTINGS", ())
    (tmp_path / "text.txt").write_text("A cache holds what was said before. " * 60)
    (tmp_path / "d.json").write_text(json.dumps(diagnosis()))
    arguments = ["compare", tiny_model("llama"), "-f", tmp_path / "text.txt", "-c", 96, "--chunks", 1, "-t", 1,
                 "--report", tmp_path / "out", "--diagnose", tmp_path / "d.json"]  # fmt: skip
    assert kvrun(*arguments) == 0, capsys.readouterr().err
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    parts = {"kv4+offset", "kv4-g32", "kv4-g32+order"}
    assert {r["type_k"] for r in content["rows"]} == {"f16", "kv4", "kv1"} | parts
    beside = {"kv4", "kv4 4+32", "kv4 rotated", "kv4 rotated 4+32", "kv4+offset/kv4", "kv4-g32", "kv4-g32+order"}
    assert set(content["positions"]) == beside and all(len(points) == 8 for points in content["positions"].values())
    for name in ("report.md", "report.html"):
        page = (tmp_path / "out" / name).read_text()
        assert "By confidence of the reference" in page and "By position in the window" in page
    assert len(content["header"]["Text"][1].split()[-1]) == 64 and "torch" in content["header"]["Versions"]
    assert "Keys of layer 0 stand out." in (tmp_path / "out" / "report.html").read_text()
    before = (tmp_path / "out" / "report.json").stat().st_mtime_ns
    capsys.readouterr()

    assert kvrun(*arguments) == 1
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and "exists" in err and "--force" in err
    assert (tmp_path / "out" / "report.json").stat().st_mtime_ns == before


def test_force_without_a_report_is_wrong_usage(tiny_model: Callable[..., Path]) -> None:
    assert kvrun("compare", tiny_model("llama"), "--force") == 2


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_names_of_many_curves_that_end_together_do_not_cover_one_another(width: int) -> None:
    """Nine that end at the bottom: their names stand one above the other, inside the drawing."""
    curves = {f"setting {i}": [(256.0, 1.0), (500.0, 0.01 * (1 + i / 1000))] for i in range(9)}
    root = ElementTree.fromstring(by_position(curves, width))
    labels = [e for e in root.iter() if e.tag.endswith("text") and (e.text or "").startswith("setting")]
    heights = sorted(float(e.attrib["y"]) for e in labels)
    assert len(heights) == 9 and min(b - a for a, b in itertools.pairwise(heights)) >= 13.9
    assert heights[0] > 0 and heights[-1] < 380 - 44 + 12
    styles = {e.attrib["class"] for e in root.iter() if e.tag.endswith("polyline")}
    assert len(styles) == 9, "each has a look of its own"
