"""Reading a report back: is it one whole page, and is there something in every plot?"""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from html.parser import HTMLParser

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
VOID = {"meta", "br", "hr", "img", "link", "input"}
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


@dataclass
class Page(HTMLParser):
    """A page's elements; raises where a tag is not closed or an id stands twice."""

    text: str
    ids: set[str] = field(default_factory=set)
    targets: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._open: list[str] = []
        self.feed(self.text)
        self.close()
        assert self._open == [], f"never closed: {self._open}"
        for target in self.targets:
            assert target.startswith("#"), f"the page needs {target}"
            assert target[1:] in self.ids, f"{target} leads nowhere"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has a script in {name}"
            if name == "id":
                assert value not in self.ids, f"id {value} stands twice"
                self.ids.add(str(value))
            if name in ("href", "src", "xlink:href"):
                self.targets.append(str(value))
            if name == "aria-labelledby":
                self.targets += [f"#{label}" for label in str(value).split()]

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        opened = self._open.pop()
        assert opened == tag, f"<{opened}> closed by </{tag}>"

    @property
    def plots(self) -> dict[str, "Plot"]:
        """The plots by their titles."""
        found = [Plot.read(svg) for svg in re.findall(r"<svg.*?</svg>", self.text, re.DOTALL)]
        assert len({plot.title for plot in found}) == len(found), "two plots of one title"
        return {plot.title: plot for plot in found}


@dataclass
class Plot:
    """An SVG with its axes."""

    root: ElementTree.Element
    title: str

    @classmethod
    def read(cls, svg: str) -> "Plot":
        root = ElementTree.fromstring(svg)
        title, description = root.findtext(f"{SVG}title"), root.findtext(f"{SVG}desc")
        assert root.get("role") == "img"
        assert title
        assert description
        return cls(root, title)

    @property
    def axes(self) -> list["Axes"]:
        groups = [
            g for g in self.root.iter(f"{SVG}g") if re.search(r"--axes_\d+$", g.get("id", ""))
        ]
        return [Axes.read(group) for group in groups]

    @property
    def words(self) -> list[str]:
        return [element.text or "" for element in self.root.iter(f"{SVG}text")]


@dataclass
class Axes:
    """The area of one pair of axes, and what is drawn in it.

    Attributes:
        box: left, top, right, bottom.
        curves: points of each line, and of each other shape.
        marks: places at which a marker or a shape stands.
        words: labels and title.
    """

    box: tuple[float, float, float, float]
    curves: list[list[tuple[float, float]]]
    marks: list[list[tuple[float, float]]]
    words: list[str]

    @classmethod
    def read(cls, group: ElementTree.Element) -> "Axes":
        patch = next(g for g in group if "--patch_" in g.get("id", ""))
        area = points(patch.find(f"{SVG}path").get("d", ""))
        xs, ys = zip(*area, strict=True)
        data = [g for g in group.iter(f"{SVG}g") if "--data-" in g.get("id", "")]
        return cls(
            (min(xs), min(ys), max(xs), max(ys)),
            [points(path.get("d", "")) for g in data for path in drawn_paths(g)],
            [
                [(float(u.get("x", "nan")), float(u.get("y", "nan"))) for u in g.iter(f"{SVG}use")]
                for g in data
            ],
            [element.text or "" for element in group.iter(f"{SVG}text")],
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing is drawn within the area."""
        left, top, right, bottom = self.box
        return not any(
            left - 1 <= x <= right + 1 and top - 1 <= y <= bottom + 1
            for shape in self.curves + self.marks
            for x, y in shape
        )


def drawn_paths(group: ElementTree.Element) -> list[ElementTree.Element]:
    """The paths of a group that are drawn where they stand; those in defs are drawn by a use."""
    kept = {id(path) for defs in group.iter(f"{SVG}defs") for path in defs.iter(f"{SVG}path")}
    return [path for path in group.iter(f"{SVG}path") if id(path) not in kept]


def points(path: str) -> list[tuple[float, float]]:
    """The points of an SVG path of straight lines and curves."""
    numbers = [float(number) for number in NUMBER.findall(path)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def check(text: str) -> Page:
    """The page, having found that it needs nothing else and that no plot is empty."""
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"@import|url\((?!#)", text)
    for title, plot in page.plots.items():
        assert plot.axes, f"{title} has no axes"
        for axes in plot.axes:
            assert not axes.is_empty, f"{title} is empty: {axes.words}"
    return page
