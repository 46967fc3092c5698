"""The tool `browse`: a text browser without JavaScript. Page, history and cookies are kept in files between calls."""

from __future__ import annotations

import fcntl
import html.parser
import http.cookiejar
import json
import re
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urlencode, urljoin, urlsplit

from envd.tools.connectors.answers import Answer, Arguments, Refused, inside, kept
from envd.tools.connectors.web import BODY, fetch, plain_opener

LINES = 200
"""Lines of a page that one call shows."""
WIDTH = 1000
"""Characters after which a line is broken at the next tag."""
HISTORY = 50
SILENT = {"script", "style", "template", "noscript", "svg"}
INLINE = re.compile(
    "a|abbr|b|bdi|bdo|button|cite|code|em|font|i|img|input|kbd|label|mark|option|q|s|select|small|span|strong|sub|sup"
    "|textarea|u|var"
)
"""Tags that begin no line."""
SWITCHES = {"radio", "checkbox", "submit", "image"}
State = dict[str, Any]


class Field:
    """A field of a form. options: values that it may have, None for any; a switch may also be off, the value ""."""

    def __init__(self, value: str, options: list[str] | None = None, *, switch: bool = False) -> None:
        self.value, self.options, self.switch = value, options, switch

    def add(self, value: str, *, chosen: bool) -> None:
        """Add one of the values that it may have."""
        self.options = self.options or []
        self.options.append(value)
        if chosen:
            self.value = value


class Form:
    """A form with its fields, by name."""

    def __init__(self, action: str, method: str) -> None:
        self.action, self.method = action, method
        self.fields: dict[str, Field] = {}
        self.sent_by = False
        """Whether a submit button was chosen; the first is."""

    def filled(self, given: dict[str, str]) -> str:
        """The form's data with these values, encoded. Raises Refused."""
        for name, value in given.items():
            field = self.fields.get(name)
            if field is None:
                raise Refused(f"the form has no field {name[:100]!r}: it has {', '.join(self.fields) or 'none'}")
            allowed = None if field.options is None else field.options + [""] * field.switch
            if allowed is not None and value not in allowed:
                raise Refused(f"the field {name[:100]!r} may be one of {', '.join(map(repr, allowed))}")
            field.value = value
        sent = [(name, each.value) for name, each in self.fields.items() if each.value or not each.switch]
        return urlencode(sent)


class Page(html.parser.HTMLParser):
    """Lines, links and forms of a page."""

    def __init__(self, url: str) -> None:
        super().__init__(convert_charrefs=True)
        self.url, self.title = url, ""
        self.lines: list[str] = [""]
        self.links: list[str] = []
        self.forms: list[Form] = [Form(url, "get")]
        """The first has the fields that are in no form."""
        self._within = ""
        self._list, self._area, self._unnamed, self._selected = Field(""), Field(""), False, False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser."""
        values = {name: value or "" for name, value in reversed(attrs)}
        self._unnamed = False
        if not INLINE.fullmatch(tag):
            self._break()
        if self._within not in SILENT and (tag in SILENT or tag in ("pre", "title", "textarea")):
            self._within = tag
        if tag == "a" and "href" in values:
            self.links.append(self._target(values["href"]))
            self._add(f"[{len(self.links)}] ")
        elif tag == "img":
            self._add(values.get("alt", ""))
        elif tag == "form":
            self._add(f"(form {len(self.forms)})")
            self.forms.append(Form(self._target(values.get("action", "")), values.get("method", "get").lower()))
            self._break()
        elif tag == "option":
            self._selected, self._unnamed = "selected" in values, "value" not in values
            if not self._unnamed:
                self._option(values["value"])
        elif tag in ("input", "textarea", "select", "button"):
            self._control(tag, values)

    def _target(self, reference: str) -> str:
        try:
            return urljoin(self.url, reference.strip())
        except ValueError:
            return reference

    def _control(self, tag: str, values: dict[str, str]) -> None:
        form, name, value = self.forms[-1], values.get("name", ""), values.get("value", "")
        kind = values.get("type", {"input": "text", "button": "submit"}.get(tag, tag)).lower()
        self._add(f"<{kind} {name}{'=' + value if value else ''}> ")
        if tag == "select":
            self._list = Field("", [])
        elif tag == "textarea":
            self._area = Field("")
        if not name or kind in ("reset", "button"):
            return
        if kind in SWITCHES and tag in ("input", "button"):
            field = form.fields.setdefault(name, Field("", [], switch=True))
            on = "checked" in values or (kind in ("submit", "image") and not form.sent_by)
            form.sent_by |= kind in ("submit", "image")
            field.add(value or "on", chosen=on)
        else:
            form.fields[name] = {"select": self._list, "textarea": self._area}.get(tag) or Field(value)

    def _option(self, value: str) -> None:
        self._add(f"<option {value}> ")
        self._list.add(value, chosen=self._selected or not self._list.options)

    def handle_endtag(self, tag: str) -> None:
        """See HTMLParser."""
        self._unnamed = False
        if tag == self._within:
            self._within = ""
        if not INLINE.fullmatch(tag):
            self._break()

    def handle_data(self, data: str) -> None:
        """See HTMLParser."""
        within, words = self._within, " ".join(data.split())
        if within == "title":
            self.title = f"{self.title} {words}".strip()
        elif within == "textarea":
            self._area.value = data
            self._add(data)
        elif within == "pre":
            self.lines[-1:] = [each.rstrip() for each in (self.lines[-1] + data).split("\n")]
        elif self._unnamed and words:
            self._option(words)
            self._unnamed = False
        elif within not in SILENT:
            self._add(data)

    def _add(self, text: str) -> None:
        text = re.sub(r"\s+", " ", text)
        if len(self.lines[-1]) > WIDTH:
            self.lines.append("")
        self.lines[-1] += text.lstrip() if not self.lines[-1] or self.lines[-1].endswith(" ") else text

    def _break(self) -> None:
        if self.lines[-1].strip():
            self.lines.append("")


def run(arguments: Arguments) -> Answer:
    """See the schema of `browse`."""
    with kept("browser.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _run(_state(), arguments, arguments["action"], arguments.get("number", 1))


def _run(state: State, arguments: Arguments, action: str, number: int) -> Answer:
    history = state["history"]
    if action == "open":
        return _shown(_go(history, arguments["url"]))
    if not history:
        raise Refused("no page is open: use open")
    if action == "back":
        if len(history) < 2:
            raise Refused("there is no earlier page")
        return _shown(_go(history[:-2], history[-2]))
    if action == "show":
        return _shown(state, number)
    page = parsed(state)
    if action == "follow":
        if number > len(page.links):
            raise Refused(f"the page has {len(page.links)} links")
        return _shown(_go(history, page.links[number - 1]))
    if number >= len(page.forms):
        raise Refused(f"the page has {len(page.forms) - 1} forms")
    form = page.forms[number]
    data = form.filled(arguments.get("fields", {}))
    if form.method == "post":
        return _shown(_go(history, form.action, data))
    return _shown(_go(history, urlsplit(form.action)._replace(query=data).geturl()))


def _go(history: list[str], url: str, data: str | None = None) -> State:
    """Open a page; return the state of the browser, which is stored."""
    url = urldefrag(url)[0]
    if urlsplit(url).scheme in ("", "file"):
        path = inside(unquote(urlsplit(url).path) if url.startswith("file:") else url)
        with path.open("rb") as file:
            content = file.read(BODY + 1)
        status, text, more = "", content[:BODY].decode("utf-8", "replace"), len(content) > BODY
        url, markup = "file:///" + quote(str(path.relative_to(Path.cwd()))), path.suffix in (".html", ".htm", ".xhtml")
    else:
        jar = _cookies()
        handlers = (urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler())
        following = (urllib.request.HTTPRedirectHandler(), urllib.request.HTTPCookieProcessor(jar))
        headers = {} if data is None else {"Content-Type": "application/x-www-form-urlencoded"}
        found = fetch(url, "GET" if data is None else "POST", data, headers, plain_opener(*handlers, *following))
        jar.save(ignore_discard=True)
        status = "" if found.status == 200 else f"HTTP {found.status} {found.reason}".split("\n")[0]
        text, more, url = found.text, found.more, found.url
        markup = found.headers.get_content_type() in ("text/html", "application/xhtml+xml")
    state = {"history": [*history, url][-HISTORY:], "status": status, "text": text, "more": more, "markup": markup}
    kept("browser.new").write_text(json.dumps(state))
    kept("browser.new").replace(kept("browser"))
    return state


def _cookies() -> http.cookiejar.LWPCookieJar:
    jar = http.cookiejar.LWPCookieJar(str(kept("cookies")))
    try:
        jar.load(ignore_discard=True)
    except OSError:  # none yet, or the file was damaged
        jar.clear()
    return jar


def _state() -> State:
    """State that an earlier call stored; an empty one if there is none, or if it was damaged."""
    try:
        state: State = json.loads(kept("browser").read_text())
        parsed({**state, "text": ""})
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError):
        return {"history": []}
    return state


def parsed(state: State) -> Page:
    """Page that the state shows."""
    page = Page(state["history"][-1])
    if not state["markup"]:
        page.lines = state["text"].split("\n")
        return page
    try:
        page.feed(state["text"])
        page.close()
    except AssertionError as error:  # html.parser raises it for some declarations
        page.lines.append(f"[the rest of the page is malformed: {error}]")
    return page


def _shown(state: State, first: int = 1) -> Answer:
    page = parsed(state)
    count = len(page.lines) - (len(page.lines) > 1 and not page.lines[-1].strip())
    if first > count:
        raise Refused(f"the page has {count} lines")
    last = min(first + LINES - 1, count)
    head = [state["history"][-1], state["status"], page.title]
    lines = [f"{number}: {page.lines[number - 1].rstrip()}" for number in range(first, last + 1)]
    shown = Answer("\n".join([*filter(None, head), *lines]) + "\n")
    left = f"lines {first} to {last} of {count}" if count > LINES else ""
    shown.note = (
        f"[{left}{', of its first ' + str(BODY) + ' bytes' if state['more'] else ''}]" if left or state["more"] else ""
    )
    return shown
