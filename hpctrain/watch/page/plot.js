"use strict";
// A plot on a canvas: lines with a shaded range of values, dots, labelled axes.

const TICKS = 5; // intervals between ticks of an axis, approximately
const MARGIN = { left: 40, right: 14, top: 8, bottom: 40 };

function multiples(first, last, step) {
  return Array.from({ length: last - first + 1 }, (_, i) => (first + i) * step || 0);
}

function roundTicks(low, high, most) {
  const rough = (high - low) / most;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((factor) => unit * factor >= rough * 0.999);
  return { ticks: multiples(Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9), step), step };
}

function tickText(value, step) {
  if (Math.abs(value) >= 1e6 || step < 1e-4) return value.toExponential(1);
  return value.toLocaleString("en", { maximumFractionDigits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) });
}

// Limits of the axes: no mean lies outside. For a loss, no minimum does either, and they are ticks.
function limits(series, percent) {
  const steps = series.flatMap((one) => one.points.map((point) => point[0]));
  const values = series.flatMap((one) => one.points.map((point) => point[1]));
  let [left, right] = [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))];
  let [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  if (right === left) right += 1;
  if (percent) {
    const least = [90, 50, 0].find((at) => low >= at) ?? 0;
    return { left, right, low: least, high: 100, up: roundTicks(least, 100, TICKS) };
  }
  low = series.flatMap((one) => one.points.map((point) => point[2])).reduce((a, b) => Math.min(a, b), low);
  if (low >= 0 && low < high / 2) low = 0;
  if (high === low) [low, high] = [low - 0.5, high + 0.5];
  const { step } = roundTicks(low, high, TICKS);
  const ticks = multiples(Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9), step);
  return { left, right, low: ticks[0], high: ticks.at(-1), up: { ticks, step } };
}

// series: [{points: [[step, mean, minimum, maximum]...], color, dots, dashed}]
function drawPlot(canvas, series, percent, colors) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "12px system-ui, sans-serif";
  const drawn = series.filter((one) => one.points.length);
  if (!drawn.length) {
    pen.fillStyle = colors.soft;
    pen.textAlign = "center";
    pen.fillText("nothing recorded yet", width / 2, height / 2);
    return;
  }
  const box = limits(drawn, percent);
  const { up } = box;
  const widest = Math.max(...up.ticks.map((value) => pen.measureText(tickText(value, up.step)).width));
  const left = Math.max(MARGIN.left, widest + 14);
  const x = (step) => left + ((step - box.left) / (box.right - box.left)) * (width - left - MARGIN.right);
  const y = (value) => height - MARGIN.bottom - ((value - box.low) / (box.high - box.low)) * (height - MARGIN.top - MARGIN.bottom);
  drawAxes(pen, box, up, x, y, width, height, colors);
  pen.save();
  pen.beginPath();
  pen.rect(left - 4, MARGIN.top - 4, width - left - MARGIN.right + 8, height - MARGIN.top - MARGIN.bottom + 8);
  pen.clip();
  for (const one of drawn.filter((each) => !each.dots)) drawLine(pen, one, x, y);
  for (const one of drawn.filter((each) => each.dots)) drawDots(pen, one, x, y, colors);
  pen.restore();
}

function drawAxes(pen, box, up, x, y, width, height, colors) {
  const left = x(box.left);
  const across = roundTicks(box.left, box.right, Math.max(3, Math.min(8, Math.floor(width / 80))));
  pen.strokeStyle = colors.line;
  pen.fillStyle = colors.soft;
  pen.lineWidth = 1;
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const value of up.ticks) {
    const at = Math.round(y(value)) + 0.5;
    pen.beginPath();
    pen.moveTo(left, at);
    pen.lineTo(width - MARGIN.right, at);
    pen.stroke();
    pen.fillText(tickText(value, up.step), left - 8, at);
  }
  pen.textBaseline = "top";
  for (const step of across.ticks.filter(Number.isInteger)) {
    const text = tickText(step, across.step);
    const half = pen.measureText(text).width / 2;
    pen.textAlign = "center";
    pen.fillText(text, Math.min(x(step), width - half), height - MARGIN.bottom + 6);
  }
  pen.textAlign = "center";
  pen.fillText("step", (left + width - MARGIN.right) / 2, height - 16);
}

function drawLine(pen, one, x, y) {
  if (one.points.some((point) => point[3] > point[2])) {
    pen.beginPath();
    one.points.forEach((point) => pen.lineTo(x(point[0]), y(point[3])));
    [...one.points].reverse().forEach((point) => pen.lineTo(x(point[0]), y(point[2])));
    pen.globalAlpha = 0.18;
    pen.fillStyle = one.color;
    pen.fill();
    pen.globalAlpha = 1;
  }
  pen.beginPath();
  one.points.forEach((point) => pen.lineTo(x(point[0]), y(point[1])));
  if (one.points.length === 1) pen.arc(x(one.points[0][0]), y(one.points[0][1]), 1.5, 0, 2 * Math.PI);
  pen.strokeStyle = one.color;
  pen.lineWidth = 1.6;
  pen.lineJoin = "round";
  pen.setLineDash(one.dashed ? [6, 4] : []);
  pen.stroke();
  pen.setLineDash([]);
}

function drawDots(pen, one, x, y, colors) {
  for (const point of one.points) {
    pen.beginPath();
    pen.arc(x(point[0]), y(point[1]), one.points.length > 200 ? 2 : 4, 0, 2 * Math.PI);
    pen.fillStyle = one.color;
    pen.fill();
    pen.strokeStyle = colors.card;
    pen.lineWidth = 1;
    pen.stroke();
  }
}
