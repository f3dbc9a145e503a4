"use strict";
// Three linked panels over one axis of steps. Each curve is drawn by pixel columns, so its cost does not grow with the run.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const chart = document.getElementById("chart");
  const readout = document.getElementById("readout");
  const logScale = document.getElementById("log-scale");
  const panels = [...chart.querySelectorAll("canvas")].map((canvas) => ({ canvas, name: canvas.dataset.panel }));
  const titles = { loss: "loss", lr: "learning rate", grad_norm: "gradient norm" };
  const margin = { left: 64, right: 12, top: 22, bottom: 18 };
  const glyphs = { verdict: "\u25bc", rollback: "\u21b6", preempted: "\u25ae", stopped: "\u25a0", resumed: "\u25b6\ufe0e", trouble: "\u2715" };
  const colours = { verdict: "--alarm", rollback: "--rollback", preempted: "--preempted", stopped: "--faint", resumed: "--faint", trouble: "--alarm" };
  const aside = { rollback: -12, resumed: 9 }; // marks that often share their step with another one

  const last = Math.max(1, ...data.segments.map((each) => each.step[each.step.length - 1]));
  const first = Math.min(...data.segments.map((each) => each.step[0]), last);
  let view = [first, Math.max(last, first + 1)];
  let cursor = null; // {segment, index}
  let drag = null; // {from, to}, steps
  let waiting = false;

  // -- numbers ------------------------------------------------------------------------------------------------------

  const shown = (value) => {
    if (value === null || value === undefined) return "not finite or not known";
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-3 || size >= 1e5) ? Number(value.toPrecision(4)).toExponential() : String(Number(value.toPrecision(5)));
  };

  // The first place in a sorted list whose value is not below the one that is asked for.
  const lowerBound = (list, value) => {
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] < value) low = middle + 1; else high = middle;
    }
    return low;
  };

  const isLog = (name) => name === "loss" && logScale.checked;

  function range(name) {
    let low = Infinity, high = -Infinity;
    for (const each of data.segments) {
      const end = lowerBound(each.step, view[1] + 1);
      for (let i = lowerBound(each.step, view[0]); i < end; i++) {
        const value = each[name][i];
        if (value === null || (isLog(name) && value <= 0)) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    for (const [step, value] of name === "loss" ? data.evaluations : []) {
      if (step < view[0] || step > view[1] || (isLog(name) && value <= 0)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
    if (low > high) return isLog(name) ? [0.1, 1] : [0, 1];
    if (isLog(name)) return low === high ? [low / 2, high * 2] : [low / 1.05, high * 1.05];
    const room = (high - low) * 0.05 || Math.abs(high) * 0.1 || 1;
    return [low - room, high + room];
  }

  function ticks(low, high, most) {
    const raw = (high - low) / most;
    const unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= raw);
    const found = [];
    for (let at = Math.ceil(low / step) * step; at <= high; at += step) found.push(Number(at.toPrecision(12)));
    return found;
  }

  function logTicks(low, high) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
      for (const n of [1, 2, 5]) found.push(n * 10 ** power);
    }
    const inside = found.filter((at) => at >= low && at <= high);
    return inside.length > 7 ? inside.filter((at) => /^1(e|0*$)|^0\.0*1$/.test(String(at))) : inside;
  }

  // -- drawing ------------------------------------------------------------------------------------------------------

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function draw() {
    waiting = false;
    for (const panel of panels) drawPanel(panel);
  }

  function redraw() {
    if (!waiting) {
      waiting = true;
      requestAnimationFrame(draw);
    }
  }

  function drawPanel(panel) {
    const { canvas, name } = panel;
    const ratio = window.devicePixelRatio || 1;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, 'DejaVu Sans', sans-serif";
    const [low, high] = range(name);
    const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
    const x = (step) => margin.left + ((step - view[0]) / (view[1] - view[0])) * inner.width;
    const part = (value) =>
      isLog(name) ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
    const y = (value) => margin.top + (1 - part(value)) * inner.height;
    panel.x = x;
    drawAxes(pen, name, { low, high, x, y, width, height, inner });
    pen.save();
    pen.beginPath();
    pen.rect(margin.left, margin.top - 2, inner.width, inner.height + 4);
    pen.clip();
    for (const each of data.segments) {
      drawCurve(pen, each, name, x, y, each.survivors, each.step.length, true);
      drawCurve(pen, each, name, x, y, 0, each.survivors, false);
    }
    pen.restore();
    if (name === "loss") drawEvaluations(pen, x, y);
    drawMarks(pen, name, x, height);
    drawCursor(pen, name, x, y, height);
  }

  function drawAxes(pen, name, { low, high, x, y, width, height, inner }) {
    pen.strokeStyle = colour("--rule");
    pen.fillStyle = colour("--faint");
    pen.lineWidth = 1;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const levels = isLog(name) ? logTicks(low, high) : ticks(low, high, Math.max(2, inner.height / 45));
    for (const level of levels) {
      const at = Math.round(y(level)) + 0.5;
      line(pen, margin.left, at, width - margin.right, at);
      pen.fillText(shown(level), margin.left - 6, at);
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const step of ticks(view[0], view[1], Math.max(2, inner.width / 90)).filter(Number.isInteger)) {
      const label = step.toLocaleString("en");
      const rightmost = width - pen.measureText(label).width / 2;
      pen.fillText(label, Math.min(x(step), rightmost), height - margin.bottom + 4);
    }
    pen.textAlign = "left";
    pen.fillStyle = colour("--ink");
    pen.fillText(titles[name], 0, 3); // left of where the marks may stand
  }

  function line(pen, x0, y0, x1, y1) {
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.lineTo(x1, y1);
    pen.stroke();
  }

  // Points `from` up to `to` of a segment, one vertical stroke a pixel column where there are more points than columns.
  function drawCurve(pen, each, name, x, y, from, to, isLeft) {
    pen.strokeStyle = colour(isLeft ? "--left" : "--curve");
    pen.lineWidth = isLeft ? 1.25 : 1.75;
    pen.setLineDash(isLeft ? [4, 3] : []);
    const values = each[name];
    const begin = Math.max(isLeft ? from - 1 : from, lowerBound(each.step, view[0]) - 1, 0);
    const end = Math.min(to, lowerBound(each.step, view[1] + 1) + 1);
    if (isLeft && from >= to) return;
    pen.beginPath();
    let isDown = false, column = null, low = 0, high = 0, at = 0;
    const flush = () => {
      if (column !== null && low !== high) {
        pen.moveTo(column, y(low));
        pen.lineTo(column, y(high));
        pen.moveTo(column, y(at));
      }
    };
    for (let i = begin; i < end; i++) {
      const value = values[i];
      if (value === null || (isLog(name) && value <= 0)) {
        flush();
        isDown = false;
        column = null;
        continue;
      }
      const here = Math.round(x(each.step[i]) * 2) / 2;
      if (here === column) {
        low = Math.min(low, value);
        high = Math.max(high, value);
        at = value;
        continue;
      }
      flush();
      if (isDown) pen.lineTo(here, y(value)); else pen.moveTo(here, y(value));
      isDown = true;
      column = here;
      low = high = at = value;
    }
    flush();
    pen.stroke();
    pen.setLineDash([]);
    if (!isLeft || name !== "loss") return;
    pen.fillStyle = colour("--alarm");
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (let i = begin; i < end; i++) if (values[i] === null) pen.fillText(glyphs.trouble, x(each.step[i]), margin.top);
  }

  function drawEvaluations(pen, x, y) {
    pen.strokeStyle = colour("--evaluating");
    pen.fillStyle = colour("--ground");
    pen.lineWidth = 2;
    for (const [step, loss] of data.evaluations) {
      if (step < view[0] || step > view[1]) continue;
      pen.beginPath();
      pen.arc(x(step), y(loss), 4, 0, 2 * Math.PI);
      pen.fill();
      pen.stroke();
    }
  }

  function drawMarks(pen, name, x, height) {
    pen.textAlign = "center";
    pen.textBaseline = "top";
    for (const mark of data.marks) {
      if (mark.step < view[0] || mark.step > view[1]) continue;
      const at = Math.round(x(mark.step)) + 0.5;
      if (mark.kind === "checkpoint") {
        pen.strokeStyle = colour("--faint");
        pen.lineWidth = 2;
        if (name === "loss") line(pen, at, height - margin.bottom, at, height - margin.bottom - 7);
        continue;
      }
      pen.strokeStyle = pen.fillStyle = colour(colours[mark.kind]);
      pen.lineWidth = 1;
      pen.setLineDash([2, 3]);
      line(pen, at, margin.top, at, height - margin.bottom);
      pen.setLineDash([]);
      if (name !== "loss") continue;
      pen.fillText(glyphs[mark.kind], at + (aside[mark.kind] || 0), 6);
      if (mark.kind === "rollback") {
        line(pen, Math.max(margin.left, x(mark.to)), margin.top - 1, at, margin.top - 1);
        line(pen, x(mark.to), margin.top - 1, x(mark.to), margin.top + 5);
      }
    }
  }

  function drawCursor(pen, name, x, y, height) {
    if (drag !== null && drag.from !== drag.to) {
      pen.fillStyle = colour("--curve");
      pen.globalAlpha = 0.15;
      pen.fillRect(x(drag.from), margin.top, x(drag.to) - x(drag.from), height - margin.top - margin.bottom);
      pen.globalAlpha = 1;
    }
    if (cursor === null) return;
    const each = data.segments[cursor.segment];
    const step = each.step[cursor.index], value = each[name][cursor.index];
    pen.strokeStyle = colour("--faint");
    pen.lineWidth = 1;
    line(pen, x(step), margin.top, x(step), height - margin.bottom);
    if (value === null) return;
    pen.fillStyle = colour("--curve");
    pen.beginPath();
    pen.arc(x(step), y(value), 4, 0, 2 * Math.PI);
    pen.fill();
  }

  // -- what the cursor says -----------------------------------------------------------------------------------------

  // The point that counts nearest to a step; one of an abandoned branch where nothing counts there.
  function nearest(step) {
    let best = null;
    data.segments.forEach((each, segment) => {
      for (const index of [lowerBound(each.step, step) - 1, lowerBound(each.step, step)]) {
        if (index < 0 || index >= each.step.length) continue;
        const away = Math.abs(each.step[index] - step) + (index < each.survivors ? 0 : 0.5);
        if (best === null || away < best.away) best = { segment, index, away };
      }
    });
    return best;
  }

  function say() {
    if (cursor === null) return;
    const each = data.segments[cursor.segment], i = cursor.index, step = each.step[i];
    const left = i < each.survivors ? "" : ", abandoned later";
    const noted = each.noted[i] ? `, ${each.noted[i]}` : "";
    const parts = Object.keys(titles).map((name) => `${titles[name]} ${shown(each[name][i])}`);
    const near = data.marks.filter((mark) => Math.abs(mark.step - step) <= (view[1] - view[0]) / 200);
    const evaluated = data.evaluations.filter(([at]) => at === step).map(([, loss]) => `evaluation loss ${shown(loss)}`);
    const told = [...new Set(near.map((mark) => `${mark.kind} at step ${mark.step}: ${mark.text}`))].slice(0, 3);
    const whole = `step ${step.toLocaleString("en")} (attempt ${each.attempt}${noted}${left}): ${parts.join(", ")}`;
    readout.textContent = [whole, ...evaluated, ...told].join(". ");
  }

  function moveTo(step) {
    cursor = nearest(step);
    say();
    redraw();
  }

  function show(from, to) {
    const length = Math.min(Math.max(2, to - from), Math.max(2, last - first));
    const begin = Math.min(Math.max(first, from), Math.max(first, last - length));
    view = [begin, begin + length];
    chart.dataset.view = view.map((at) => Math.round(at)).join(" ");
    redraw();
  }

  function zoom(factor, around = cursor === null ? (view[0] + view[1]) / 2 : data.segments[cursor.segment].step[cursor.index]) {
    const centre = Math.min(Math.max(around, view[0]), view[1]);
    show(centre - (centre - view[0]) * factor, centre + (view[1] - centre) * factor);
  }

  // -- hands --------------------------------------------------------------------------------------------------------

  const actions = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => show(view[0] - (view[1] - view[0]) / 2, view[1] - (view[1] - view[0]) / 2),
    right: () => show(view[0] + (view[1] - view[0]) / 2, view[1] + (view[1] - view[0]) / 2),
    all: () => show(first, last),
  };
  for (const button of document.querySelectorAll("[data-do]")) {
    button.addEventListener("click", actions[button.dataset.do]);
  }

  const stepAt = (event) => {
    const box = panels[0].canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - margin.left) / (box.width - margin.left - margin.right);
    return view[0] + Math.min(1, Math.max(0, share)) * (view[1] - view[0]);
  };
  chart.addEventListener("pointermove", (event) => {
    if (drag !== null) drag.to = stepAt(event);
    moveTo(stepAt(event));
  });
  chart.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || event.pointerType === "touch") return;
    drag = { from: stepAt(event), to: stepAt(event) };
    chart.setPointerCapture(event.pointerId);
  });
  chart.addEventListener("pointerup", () => {
    const made = drag;
    drag = null;
    if (made !== null && Math.abs(made.to - made.from) > (view[1] - view[0]) / 100) {
      show(Math.min(made.from, made.to), Math.max(made.from, made.to));
    }
    redraw();
  });
  chart.addEventListener("dblclick", actions.all);
  chart.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return; // the wheel alone scrolls the page
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, stepAt(event));
  }, { passive: false });

  const keys = {
    ArrowLeft: (event) => beside(event.shiftKey ? -10 : -1),
    ArrowRight: (event) => beside(event.shiftKey ? 10 : 1),
    Home: () => moveTo(view[0]),
    End: () => moveTo(view[1]),
    "+": actions.in, "=": actions.in, "-": actions.out, "0": actions.all, Escape: actions.all,
  };
  function beside(by) {
    if (cursor === null) return moveTo(view[0]);
    moveTo(data.segments[cursor.segment].step[cursor.index] + by);
    const step = data.segments[cursor.segment].step[cursor.index];
    if (step < view[0] || step > view[1]) show(view[0] + by, view[1] + by);
  }
  chart.addEventListener("keydown", (event) => {
    const act = keys[event.key];
    if (act === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act(event);
  });

  for (const button of document.querySelectorAll("[data-step]")) {
    button.addEventListener("click", () => {
      const step = Number(button.dataset.step);
      const around = Math.max(20, (last - first) / 50);
      show(step - around, step + around);
      moveTo(step);
      chart.scrollIntoView({ block: "center" });
      chart.focus({ preventScroll: true });
    });
  }
  document.getElementById("all-events").addEventListener("change", (event) => {
    document.getElementById("log").classList.toggle("all", event.target.checked);
  });
  logScale.addEventListener("change", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(redraw).observe(chart);

  // A curve that leaves its rails is read on a logarithmic scale.
  const finite = data.segments.flatMap((each) => each.loss.filter((value) => value !== null && value > 0));
  let least = Infinity, most = 0;
  for (const value of finite) {
    if (value < least) least = value;
    if (value > most) most = value;
  }
  logScale.checked = most > 20 * least;
  if (data.segments.length === 0) readout.textContent = "No step was made yet.";
  actions.all();
})();
