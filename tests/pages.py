"""A page that stands alone, by Python's own parser: well formed, nothing fetched, one script of its own."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

VOID = {"br", "meta", "link", "img", "input", "hr", "rect", "line", "circle", "polyline"}
FETCHING = {"src", "srcset", "href", "action", "data", "poster", "xlink:href"}


class Page(HTMLParser):
    """What is in a page; raises AssertionError where it is not well formed."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.text = text
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[tuple[str, str]] = []  # (innermost element with a class or an id, text)
        self._homes: list[str] = [""]
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.elements.append((tag, found))
        if tag not in VOID:
            self.open.append(tag)
            self._homes.append(found.get("class") or found.get("id") or self._homes[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open and self.open[-1] == tag, (tag, self.open, self.getpos())
            self.open.pop()
            self._homes.pop()

    def handle_data(self, data: str) -> None:
        self.words.append((self._homes[-1], data))

    def all(self, tag: str) -> list[dict[str, str]]:
        """The attributes of each element of a kind, in order."""
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self) -> str:
        """The text of the body, style and script left out."""
        body = self.text[self.text.index("<body>") : self.text.rindex("<script>")]
        reader = HTMLParser(convert_charrefs=True)
        parts: list[str] = []
        reader.handle_data = parts.append  # type: ignore[method-assign]
        reader.feed(body)
        reader.close()
        return "".join(parts)


def stands_alone(text: str) -> Page:
    """Checks that a page asks for nothing, and runs nothing but its own script; returns what is in it."""
    page = Page(text)
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            assert name not in FETCHING or value.startswith("data:"), (tag, name, value)
    assert not re.search(r"url\((?!data:)|@import", text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = (meta["content"] for meta in page.all("meta") if "http-equiv" in meta)
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in policy
    assert len(page.all("script")) == 1 and not page.all("img") and not page.all("iframe")
    return page
