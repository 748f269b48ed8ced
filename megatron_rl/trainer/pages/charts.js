'use strict';
{
// Charts of the metrics. Those of one axis have the same range of steps and the same marked step.
const charts = JSON.parse(document.getElementById('charts').textContent);
const SVG = 'http://www.w3.org/2000/svg';
// Sizes in the units of a chart: the whole, and the margins around the curves.
const WIDTH = 460, HEIGHT = 240, LEFT = 56, RIGHT = 12, TOP = 8, BOTTOM = 24;
const MAX_TICKS = 5;
const HEADROOM = 0.08; // share of the axis above and below the curves
const DRAG = 8; // shortest drag that zooms, in pixels
const axes = new Map();
for (const chart of charts) {
  const steps = chart.curves.filter(curve => curve.steps.length)
    .flatMap(curve => [curve.steps[0], curve.steps.at(-1)]);
  const all = axes.get(chart.axis)?.all ?? [Infinity, -Infinity];
  axes.set(chart.axis, {all: [Math.min(all[0], ...steps), Math.max(all[1], ...steps)], range: null});
}
const rangeOf = chart => axes.get(chart.axis).range ?? axes.get(chart.axis).all;
const drawn = [];

function make(parent, tag, attributes = {}, text = '') {
  const element = parent.namespaceURI === SVG || tag === 'svg'
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return parent.appendChild(element);
}

function number(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

// Round numbers that divide a range into at most MAX_TICKS parts.
function ticks(low, high) {
  const rough = (high - low) / MAX_TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(size => size >= rough * (1 - 1e-9));
  const result = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++)
    result.push(Number((index * step).toPrecision(12)));
  return result;
}

function powers(low, high) {
  const result = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++)
    for (const factor of high / low < 100 ? [1, 2, 5] : [1])
      if (factor * 10 ** power >= low && factor * 10 ** power <= high) result.push(factor * 10 ** power);
  return result;
}

// Points of a curve within the range, and one beyond each end, so that its line is not cut.
function visible(curve, values, range) {
  const points = curve.steps.map((step, index) => [step, values[index]]);
  let first = points.findIndex(point => point[0] >= range[0]);
  let last = points.findLastIndex(point => point[0] <= range[1]);
  if (first < 0 || last < 0) return [];
  return points.slice(Math.max(0, first - 1), last + 2);
}

// Areas of a stacked chart lie on top of each other: each has the sums up to it.
function heights(chart) {
  let sums = null;
  return chart.curves.map(curve => {
    if (!chart.stacked) return curve.values;
    sums = curve.values.map((value, index) => value + (sums === null ? 0 : sums[index]));
    return sums;
  });
}

function axis(chart, values) {
  // Long runs have more values than a call can have arguments.
  let low = values.reduce((least, value) => Math.min(least, value));
  let high = values.reduce((most, value) => Math.max(most, value));
  const logarithmic = chart.logarithmic && low > 1e-100 && high >= 10 * low;
  if (logarithmic) return {low: low / 1.3, high: high * 1.3, logarithmic};
  if (chart.limits !== null) [low, high] = chart.limits;
  if (chart.stacked || (low > 0 && low < high / 4)) low = 0;
  const room = (high - low || Math.abs(high) || 1) * HEADROOM;
  return {low: low === 0 || chart.limits !== null ? low : low - room, high: high + room, logarithmic};
}

function draw(figure, chart) {
  const sums = heights(chart), range = rangeOf(chart);
  const shown = chart.curves.map((curve, index) => visible(curve, sums[index], range));
  const values = shown.flat().map(point => point[1]);
  figure.querySelector('svg')?.remove();
  const svg = make(figure, 'svg', {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: 'img', tabindex: 0,
    'aria-label': `${chart.title}, by step; arrow keys move over the steps`});
  if (values.length === 0) return {svg, chart, x: () => LEFT};

  const {low, high, logarithmic} = axis(chart, values);
  const scale = logarithmic ? Math.log10 : value => value;
  const span = Math.max(1e-9, range[1] - range[0]);
  const x = step => LEFT + (WIDTH - LEFT - RIGHT) * (step - range[0]) / span;
  const y = value => HEIGHT - BOTTOM
    - (HEIGHT - TOP - BOTTOM) * (scale(value) - scale(low)) / (scale(high) - scale(low));

  for (const value of logarithmic ? powers(low, high) : ticks(low, high)) {
    make(svg, 'line', {class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value)});
    make(svg, 'text', {x: LEFT - 6, y: y(value) + 4, 'text-anchor': 'end'}, number(value));
  }
  for (const step of ticks(range[0], Math.max(range[1], range[0] + 1)).filter(Number.isInteger))
    if (step <= range[1])
      make(svg, 'text', {x: x(step), y: HEIGHT - 6, 'text-anchor': 'middle'}, step);

  // A nested picture cuts what is beyond the ends of the range.
  const frame = make(svg, 'svg', {x: LEFT, y: 0, width: WIDTH - LEFT - RIGHT, height: HEIGHT,
    viewBox: `${LEFT} 0 ${WIDTH - LEFT - RIGHT} ${HEIGHT}`});
  const path = points => points.map((point, index) =>
    `${index ? 'L' : 'M'}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join('');
  if (chart.stacked) for (const index of [...shown.keys()].reverse()) {
    const points = shown[index];
    const base = `L${x(points.at(-1)[0])} ${y(low)}L${x(points[0][0])} ${y(low)}Z`;
    make(frame, 'path', {d: path(points) + base, fill: chart.curves[index].colour});
  } else chart.curves.forEach((curve, index) => {
    const style = {fill: 'none', stroke: curve.colour};
    const faint = curve.thin || curve.means !== null;
    make(frame, 'path', {d: path(shown[index]), ...style, 'stroke-width': faint ? 1 : 1.8, opacity: faint ? 0.35 : 1});
    if (curve.means !== null)
      make(frame, 'path', {d: path(visible(curve, curve.means, range)), ...style, 'stroke-width': 1.8});
    // Few points are single measurements, such as evaluations.
    if (!faint && shown[index].length <= 40)
      for (const point of shown[index])
        make(frame, 'circle', {cx: x(point[0]), cy: y(point[1]), r: 2.5, fill: curve.colour});
  });
  const rule = make(frame, 'line', {class: 'rule', y1: TOP, y2: HEIGHT - BOTTOM, visibility: 'hidden'});
  const selection = make(frame, 'rect', {class: 'selection', y: TOP, height: HEIGHT - TOP - BOTTOM, width: 0});
  return {svg, chart, x, rule, selection};
}

// The values at a step below each chart; without a step those of the last one.
function readOut(figure, chart, step) {
  const legend = figure.querySelector('.legend');
  legend.replaceChildren();
  const named = chart.curves.filter(curve => !curve.thin);
  const texts = named.map(curve => {
    let index = step === null ? curve.steps.length - 1 : curve.steps.findLastIndex(value => value <= step);
    if (index < 0) index = 0;
    const mean = curve.means === null ? '' : `, mean ${number(curve.means[index])}`;
    return [curve.steps[index], `${number(curve.values[index])}${mean}`];
  });
  named.forEach((curve, index) => {
    const entry = make(legend, 'span', {});
    if (named.length > 1) make(entry, 'i', {style: `background:${curve.colour}`});
    make(entry, 'span', {}, named.length > 1 ? `${curve.label} ` : `step ${texts[index][0]}: `);
    make(entry, 'b', {}, texts[index][1]);
  });
  if (named.length > 1) make(legend, 'span', {}, `step ${Math.max(...texts.map(text => text[0]))}`);
}

function mark(axis, step) {
  for (const {figure, chart, picture} of drawn) {
    if (chart.axis !== axis) continue;
    readOut(figure, chart, step);
    if (!picture.rule) continue;
    picture.rule.setAttribute('visibility', step === null ? 'hidden' : 'visible');
    if (step !== null) for (const end of ['x1', 'x2']) picture.rule.setAttribute(end, picture.x(step));
  }
}

// Step of the chart's curves that is nearest to a position on the screen.
function stepAt(svg, chart, clientX) {
  const box = svg.getBoundingClientRect();
  const share = ((clientX - box.left) / box.width * WIDTH - LEFT) / (WIDTH - LEFT - RIGHT);
  const range = rangeOf(chart);
  const position = range[0] + share * (range[1] - range[0]);
  const steps = chart.curves.flatMap(curve => curve.steps).filter(step => step >= range[0] && step <= range[1]);
  return steps.reduce((best, step) => Math.abs(step - position) < Math.abs(best - position) ? step : best, steps[0]);
}

function follow(picture) {
  const {svg, chart} = picture;
  let start = null, marked = null;
  svg.addEventListener('pointerdown', event => {
    start = event.clientX;
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener('pointermove', event => {
    const step = stepAt(svg, chart, event.clientX);
    if (step === undefined) return;
    marked = step;
    mark(chart.axis, step);
    if (start === null || Math.abs(event.clientX - start) < DRAG) return;
    const edges = [picture.x(stepAt(svg, chart, start)), picture.x(step)].sort((a, b) => a - b);
    picture.selection.setAttribute('x', edges[0]);
    picture.selection.setAttribute('width', edges[1] - edges[0]);
  });
  svg.addEventListener('pointerup', event => {
    if (start !== null && Math.abs(event.clientX - start) >= DRAG) {
      const steps = [stepAt(svg, chart, start), stepAt(svg, chart, event.clientX)].sort((a, b) => a - b);
      if (steps[1] > steps[0]) zoom(chart.axis, steps);
    }
    start = null;
  });
  svg.addEventListener('pointerleave', () => mark(chart.axis, null));
  svg.addEventListener('dblclick', () => zoom(chart.axis, null));
  svg.addEventListener('keydown', event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (move === undefined) return;
    const range = rangeOf(chart);
    const steps = [...new Set(chart.curves.flatMap(curve => curve.steps))].sort((a, b) => a - b)
      .filter(step => step >= range[0] && step <= range[1]);
    const index = marked === null ? (move > 0 ? 0 : steps.length - 1) : steps.indexOf(marked) + move;
    marked = steps[Math.min(steps.length - 1, Math.max(0, index))] ?? null;
    mark(chart.axis, marked);
    event.preventDefault();
  });
}

// Draw the charts of an axis with a range of steps, or with all steps for null.
function zoom(axis, range) {
  axes.get(axis).range = range;
  document.getElementById('whole').hidden = [...axes.values()].every(entry => entry.range === null);
  for (const entry of drawn.filter(item => item.chart.axis === axis)) {
    entry.picture = draw(entry.figure, entry.chart);
    follow(entry.picture);
  }
  mark(axis, null);
}

function showAll() {
  for (const axis of axes.keys()) zoom(axis, null);
}

const flat = document.getElementById('flat');
for (const chart of charts) {
  const figure = make(chart.flat ? flat.querySelector('div') : document.getElementById('curves'), 'figure');
  make(figure, 'figcaption', {}, chart.title);
  make(figure, 'div', {class: 'legend'});
  drawn.push({figure, chart, picture: null});
}
const folded = charts.filter(chart => chart.flat);
flat.hidden = folded.length === 0;
flat.querySelector('summary').textContent = `${folded.length} flat ${folded.length === 1 ? 'curve' : 'curves'}: `
  + folded.map(chart => `${chart.title} ${number(chart.curves[0].values.at(-1))}`).join('; ');
document.getElementById('whole').addEventListener('click', showAll);
showAll();
}
