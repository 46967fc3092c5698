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
from envd.tools.connectors.web import BODY, decoded, fetch, plain_opener

LINES = 200
"""Lines of a page that one call shows."""
WIDTH = 1000
"""Characters after which a line is broken at the next tag."""
HISTORY = 50
LAST = 253_402_300_799
"""Second at which the year 9999 ends."""
SILENT = {"script", "style", "template", "noscript", "svg"}
INLINE = re.compile(
    "a|abbr|b|bdi|bdo|button|cite|code|em|font|i|img|input|kbd|label|mark|option|q|s|select|small|span|strong|sub|sup"
    "|textarea|u|var"
)
"""Tags that begin no line."""
BUTTONS = {"submit", "image"}
SWITCHES = {"radio", "checkbox"} | BUTTONS
State = dict[str, Any]


class Field:
    """A field of a form. values: what it sends; options: values that it may have, None for any; a switch may also be
    off, the value "". many: whether several options may be chosen.
    """

    def __init__(self, kind: str, values: list[str], options: list[str] | None = None, *, many: bool = False) -> None:
        self.values, self.options, self.many = values, options, many
        self.switch, self.button = kind in SWITCHES, kind in BUTTONS

    def add(self, value: str, *, chosen: bool) -> None:
        """Add one of the values that it may have."""
        self.options = self.options or []
        self.options.append(value)
        if chosen and self.many:
            self.values.append(value)
        elif chosen:
            self.values = [value]

    @property
    def allowed(self) -> list[str] | None:
        """Values that may be given; None: any."""
        return None if self.options is None else self.options + [""] * self.switch


class Form:
    """A form with its fields, in order; names may be equal."""

    def __init__(self, action: str, method: str) -> None:
        self.action, self.method = action, method
        self.fields: list[tuple[str, Field]] = []
        self.switches: dict[tuple[str, str], Field] = {}
        """Of the fields, the switches, by kind and name: those of one name are one field."""
        self.sent_by = False
        """Whether a submit button was chosen; the first is."""

    def filled(self, given: dict[str, str]) -> str:
        """The form's data with these values, encoded: one takes the place of all values of its name, and a button
        that of the other buttons. Raises Refused.
        """
        for name, value in given.items():
            named = [each for known, each in self.fields if known == name]
            if not named:
                known = ", ".join(dict.fromkeys(known for known, _ in self.fields))
                raise Refused(f"the form has no field {name[:100]!r}: it has {known or 'none'}")
            taking = next((each for each in named if each.allowed is None or value in each.allowed), None)
            if taking is None:
                allowed = dict.fromkeys(value for each in named for value in each.allowed or [])
                raise Refused(f"the field {name[:100]!r} may be one of {', '.join(map(repr, allowed))}")
            for each in [each for _, each in self.fields if each.button] * taking.button + named:
                each.values = []
            taking.values = [value] if value or not taking.switch else []
        return urlencode([(name, value) for name, each in self.fields for value in each.values])


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
        self._base, self._form = "", self.forms[0]
        self._list, self._area = Field("select", [], []), Field("textarea", [""])
        self._unnamed, self._selected = False, False

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
        elif tag == "base" and not self._base:
            self._base = self._target(values.get("href", ""))
        elif tag == "img":
            self._add(values.get("alt", ""))
        elif tag == "form":
            self._add(f"(form {len(self.forms)})")
            action = values.get("action", "").strip()
            self._form = Form(self._target(action) if action else self.url, values.get("method", "get").lower())
            self.forms.append(self._form)
            self._break()
        elif tag == "option":
            self._selected, self._unnamed = "selected" in values, "value" not in values
            if not self._unnamed:
                self._option(values["value"])
        elif tag in ("input", "textarea", "select", "button"):
            self._control(tag, values)

    def _target(self, reference: str) -> str:
        try:
            return urljoin(self._base or self.url, reference.strip())
        except ValueError:
            return reference

    def _control(self, tag: str, values: dict[str, str]) -> None:
        form, name, value = self._form, values.get("name", ""), values.get("value", "")
        kind = values.get("type", {"input": "text", "button": "submit"}.get(tag, tag)).lower()
        self._add(f"<{kind} {name}{'=' + value if value else ''}> ")
        if tag == "select":
            self._list = Field(tag, [], [], many="multiple" in values)
        elif tag == "textarea":
            self._area = Field(tag, [""])
        if kind in ("reset", "button") or "disabled" in values:
            return
        on = "checked" in values or (kind in BUTTONS and not form.sent_by)
        form.sent_by |= kind in BUTTONS
        if not name:
            return
        if kind in SWITCHES and tag in ("input", "button"):
            field = form.switches.get((kind, name))
            if field is None:
                field = form.switches[kind, name] = Field(kind, [], [], many=kind == "checkbox")
                form.fields.append((name, field))
            field.add(value or "on", chosen=on)
        else:
            form.fields.append((name, {"select": self._list, "textarea": self._area}.get(tag) or Field(kind, [value])))

    def _option(self, value: str) -> None:
        self._add(f"<option {value}> ")
        self._list.add(value, chosen=self._selected or not (self._list.options or self._list.many))

    def handle_endtag(self, tag: str) -> None:
        """See HTMLParser."""
        self._unnamed = False
        if tag == self._within:
            self._within = ""
        if tag == "form":
            self._form = self.forms[0]
        if not INLINE.fullmatch(tag):
            self._break()

    def handle_data(self, data: str) -> None:
        """See HTMLParser."""
        within, words = self._within, " ".join(data.split())
        if within == "title":
            self.title = f"{self.title} {words}".strip()
        elif within == "textarea":
            self._area.values = [data]
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
        status, text, more = "", "", len(content) > BODY
        url, markup = "file:///" + quote(str(path.relative_to(Path.cwd()))), path.suffix in (".html", ".htm", ".xhtml")
        text = decoded(content[:BODY], markup)
    else:
        jar = _cookies()
        handlers = (urllib.request.HTTPErrorProcessor(), urllib.request.HTTPDefaultErrorHandler())
        following = (_Redirects(), urllib.request.HTTPCookieProcessor(jar))
        headers = {} if data is None else {"Content-Type": "application/x-www-form-urlencoded"}
        found = fetch(url, "GET" if data is None else "POST", data, headers, plain_opener(*handlers, *following))
        _keep(jar)
        status = "" if found.status == 200 else f"HTTP {found.status} {found.reason}".split("\n")[0]
        text, more, url = found.text, found.more, found.url
        markup = found.markup
    state = {"history": [*history, url][-HISTORY:], "status": status, "text": text, "more": more, "markup": markup}
    kept("browser.new").write_text(json.dumps(state))
    kept("browser.new").replace(kept("browser"))
    return state


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Redirects without fragments; 307 and 308 send a body again."""

    http_error_308 = urllib.request.HTTPRedirectHandler.http_error_302  # Python 3.9 has none

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """See HTTPRedirectHandler."""
        newurl = urldefrag(newurl)[0]
        if code not in (307, 308):
            return super().redirect_request(req, fp, code, msg, headers, newurl)
        host = req.origin_req_host
        return urllib.request.Request(newurl, req.data, dict(req.headers), host, True, req.get_method())


def _keep(jar: http.cookiejar.LWPCookieJar) -> None:
    """Store cookies; those that last longer than a date can tell last until then."""
    for each in jar:
        each.expires = each.expires and min(each.expires, LAST)
    new = kept("cookies.new")
    jar.save(str(new), ignore_discard=True)
    new.replace(kept("cookies"))


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
