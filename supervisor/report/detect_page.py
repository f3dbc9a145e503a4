"""One offline page that draws loss logs and what the detector found in them; everything from a file is escaped."""

import math
from html import escape

from supervisor.detect import ONE_LOG, Examined
from supervisor.loss_log import Row
from supervisor.report.figures import printable
from worker.contract.words import count

_WIDTH, _HEIGHT, _MARGIN = 960, 260, 8
_BUCKETS = 800
_TOLD = 50

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --curve: #2563eb; --found: #b91c1c; --faint: #d4d4d4 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e5e5; --paper: #171717; --curve: #60a5fa; --found: #f87171; --faint: #404040 }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
       color: var(--ink); background: var(--paper) }
h2 { font-size: 1.05rem; overflow-wrap: anywhere; margin: 2rem 0 .25rem }
svg { width: 100%; height: auto; border: 1px solid var(--faint) }
polyline { fill: none; stroke: var(--curve); stroke-width: 1.2 }
line { stroke: var(--found); stroke-dasharray: 5 3 }
svg text { fill: var(--ink); font-size: 13px } svg text.found { fill: var(--found) }
td, th { padding: .1rem 1rem .1rem 0; text-align: right } td:first-child, th:first-child { text-align: left }
"""


def detect_page(examined: list[Examined]) -> str:
    """The page, whole."""
    body = "".join(_section(one) for one in examined)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="generator" content="higgsfield">'
        "<title>Loss logs, examined</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body><h1>Loss logs, examined</h1>{body}</body></html>\n"
    )


def _section(one: Examined) -> str:
    rows = "".join(
        f"<tr><td>{escape(found.kind)}</td><td>{found.step}</td><td>{found.onset_step}</td><td>{found.index}</td></tr>"
        for found in one.verdicts[:_TOLD]
    )
    more = f"<p>and {len(one.verdicts) - _TOLD} more</p>" if len(one.verdicts) > _TOLD else ""
    head = "<tr><th>found</th><th>at step</th><th>since step</th><th>row</th></tr>"
    after = f"<p>After the first: {ONE_LOG}.</p>" if len(one.verdicts) > 1 else ""
    said = f"<table>{head}{rows}</table>{more}{after}" if rows else "<p>Nothing that calls for a rollback.</p>"
    return (
        f"<h2>{escape(printable(str(one.file)))}</h2><p>{count(len(one.rows), 'training step')}</p>{_curve(one)}{said}"
    )


def _curve(one: Examined) -> str:
    """The loss over the rows, on a logarithmic axis where it spans a lot; at most 1,600 points are drawn."""
    known = [row for row in one.rows if row.loss is not None and math.isfinite(row.loss)]
    if not known:
        return "<p>No loss in it is a number.</p>"
    last = max(one.rows[-1].index, 1)
    scale = _Scale([row.loss for row in known if row.loss is not None])
    points = " ".join(f"{_x(row.index, last):.1f},{scale.y(row.loss or 0.0):.1f}" for row in _thinned(known))
    marks = "".join(
        _mark(_x(found.index, last), 16 + 16 * (number % 3), found.kind)
        for number, found in enumerate(one.verdicts[:_TOLD])
    )
    label = f"loss from {scale.least:.4g} to {scale.most:.4g}{', logarithmic' if scale.is_log else ''}"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"><polyline points="{points}"/>{marks}'
        f'<text x="8" y="{_HEIGHT - 8}">{label}; step {one.rows[0].step} to {one.rows[-1].step}</text></svg>'
    )


def _mark(x: float, y: int, kind: str) -> str:
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_HEIGHT}"/>'
    return f'{line}<text class="found" x="{min(x + 4, _WIDTH - 90):.1f}" y="{y}">{escape(kind)}</text>'


class _Scale:
    """Heights for losses."""

    def __init__(self, losses: list[float]) -> None:
        self.least, self.most = min(losses), max(losses)
        self.is_log = self.least > 0 and self.most > 50 * self.least
        self._low, self._high = self._place(self.least), self._place(self.most)

    def _place(self, loss: float) -> float:
        return math.log(loss) if self.is_log else loss

    def y(self, loss: float) -> float:
        """From the top, in the picture's units."""
        span = self._high / 2 - self._low / 2
        share = 0.5 if span <= 0 else (self._place(loss) / 2 - self._low / 2) / span
        return _HEIGHT - 24 - _MARGIN - share * (_HEIGHT - 24 - 2 * _MARGIN)


def _x(index: int, last: int) -> float:
    return _MARGIN + index / last * (_WIDTH - 2 * _MARGIN)


def _thinned(rows: list[Row]) -> list[Row]:
    """The lowest and the highest loss of each stretch, in their order: no spike is lost."""
    size = max(1, math.ceil(len(rows) / _BUCKETS))
    if size == 1:
        return rows
    kept = []
    for at in range(0, len(rows), size):
        stretch = rows[at : at + size]
        low, high = min(stretch, key=_loss), max(stretch, key=_loss)
        kept += sorted({low.index: low, high.index: high}.values(), key=_index)
    return kept


def _index(row: Row) -> int:
    return row.index


def _loss(row: Row) -> float:
    return row.loss if row.loss is not None else 0.0
