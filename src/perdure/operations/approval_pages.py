"""The HTML of the pages behind approval links: no script, one style, whose hash the content security policy names.

Everything that comes from a run is escaped. Characters that are invisible or change the direction of text are shown as escapes,
so a page cannot show something else than what is approved.
"""

from __future__ import annotations

import base64
import hashlib
import html
from datetime import datetime
from typing import Any, Final

import msgspec

from perdure.model.logs import printable
from perdure.operations.approvals import PendingApproval

_STYLE: Final = """
:root { color-scheme: light dark; --line: #d8dce2; --soft: #667085; --back: #f4f5f7; --card: #fff; --ink: #1a1f29; --go: #1a7f4b;
  --stop: #b42318; --code: #f7f8fa }
@media (prefers-color-scheme: dark) { :root { --line: #343a46; --soft: #98a2b3; --back: #12151b; --card: #1b2029; --ink: #e8ebf0;
  --go: #2e9e63; --stop: #d0453a; --code: #14181f } }
* { box-sizing: border-box }
body { margin: 0; padding: 2rem 1rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif }
main { max-width: 42rem; margin: 0 auto; padding: 2rem; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px }
h1 { margin: 0 0 .25rem; font-size: 1.5rem; line-height: 1.25; overflow-wrap: anywhere }
p { margin: 0 0 1rem; overflow-wrap: anywhere }
.soft { color: var(--soft); font-size: .9rem }
main > :last-child, form > :last-child { margin-bottom: 0 }
time { white-space: nowrap }
table { width: 100%; margin: 1rem 0; border-collapse: collapse }
th, td { padding: .5rem .75rem; border-top: 1px solid var(--line); text-align: left; vertical-align: top;
  overflow-wrap: anywhere }
th { width: 30%; color: var(--soft); font-weight: 500 }
td { white-space: pre-wrap }
pre { margin: 1rem 0; padding: 1rem; max-height: 24rem; overflow: auto; background: var(--code); border: 1px solid var(--line);
  border-radius: 8px; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere }
td pre { margin: 0; padding: .5rem .75rem }
form { margin: 1.5rem 0 0; padding-top: 1.25rem; border-top: 1px solid var(--line) }
label { display: block; margin-bottom: .35rem; font-size: .9rem; color: var(--soft) }
textarea { width: 100%; min-height: 4.5rem; padding: .6rem .75rem; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); color: inherit; font: inherit; resize: vertical }
.buttons { display: flex; gap: .75rem; margin: 1rem 0 .75rem; flex-wrap: wrap }
button { flex: 1 1 10rem; padding: .7rem 1rem; border: 0; border-radius: 8px; color: #fff; font: inherit; font-weight: 600;
  cursor: pointer }
button:focus-visible, textarea:focus-visible { outline: 3px solid #6ea8fe; outline-offset: 2px }
.go { background: var(--go) } .stop { background: var(--stop) }
"""
STYLE_HASH: Final = "sha256-" + base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
_MAX_ROWS: Final = 40
_LABELS: Final = {"approve": ("go", "Approve"), "reject": ("stop", "Reject")}


def render_request(asked: PendingApproval, by: str, actions: tuple[str, ...]) -> str:
    """What is asked, with a form that has a button for each action."""
    expires = "" if asked.expires_at is None else f", open until {_instant(asked.expires_at)}"
    reason = '<label for="reason">Reason, if you reject</label><textarea id="reason" name="reason" maxlength="10000"></textarea>'
    buttons = "".join(
        f'<button class="{style}" name="action" value="{action}">{label}</button>'
        for action, (style, label) in _LABELS.items()
        if action in actions
    )
    return _page(
        asked.name,
        f"<h1>{_text(asked.name)}</h1>"
        f'<p class="soft">Asked by {_text(asked.workflow)}, run {_text(asked.run_id)}<br>on {_instant(asked.requested_at)}'
        f"{expires}</p>"
        f"{_payload(asked.payload)}"
        f'<form method="post">{reason if "reject" in actions else ""}<div class="buttons">{buttons}</div>'
        f'<p class="soft">You decide as {_text(by)}. A decision is final.</p></form>',
    )


def render_decision(*, is_approval: bool) -> str:
    """What is shown after a decision."""
    title = "Approved" if is_approval else "Rejected"
    return render_message(title, "Your decision was recorded. You can close this page.")


def render_message(title: str, text: str) -> str:
    """A page that says something."""
    return _page(title, f"<h1>{_text(title)}</h1><p>{_text(text)}</p>")


def _page(title: str, content: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head><body><main>{content}</main></body></html>"
    )


def _payload(payload: Any) -> str:
    """An object as a table, everything else as JSON."""
    match payload:
        case None:
            return ""
        case dict() if 0 < len(payload) <= _MAX_ROWS:
            rows = "".join(f"<tr><th>{_text(name)}</th><td>{_value(value)}</td></tr>" for name, value in payload.items())
            return f"<table>{rows}</table>"
        case str():
            return f"<pre>{_text(payload)}</pre>"
    return f"<pre>{_json(payload)}</pre>"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    return f"<pre>{_json(value)}</pre>" if isinstance(value, dict | list) else _json(value)


def _json(value: Any) -> str:
    return _text(msgspec.json.format(msgspec.json.encode(value)).decode())


def _text(text: str) -> str:
    return html.escape(printable(text))


def _instant(at: datetime) -> str:
    return f"<time>{at:%Y-%m-%d %H:%M} UTC</time>"
