'use strict';
{
// List of samples with filters, which are in the page's address, too, so that a selection can be sent to others.
const {rows, counts} = JSON.parse(document.getElementById('rows').textContent);
const field = name => document.getElementById(name);
const FILTERS = ['view', 'sort', 'set', 'step', 'mark', 'finish', 'low', 'high', 'short', 'long', 'text'];
const SHOWN = 50; // samples at first, and with each click on "more"
let limit = SHOWN;
// Number of the row whose prompt, or whose group, is shown alone; null for all rows.
let only = {prompt: null, group: null};

function options(name, values) {
  for (const value of values) field(name).add(new Option(value, value));
}
const turns = row => row.turns ?? [];
const different = key => [...new Set(rows.map(row => row[key]))];
options('set', different('set'));
options('step', different('step').sort((a, b) => a - b));
options('mark', ['worst', 'best', 'longest', 'invalid'].filter(mark => rows.some(row => row.marks.includes(mark))));
options('finish', different('finish').filter(word => word !== null));

// Samples of one prompt in one step; evaluation sets have no numbers of groups.
const groupOf = row => JSON.stringify([row.set, row.step, row.group ?? row.prompt]);

function within(value, low, high) {
  return (low === '' || (value !== null && value >= Number(low)))
    && (high === '' || (value !== null && value <= Number(high)));
}

function matches(row) {
  const value = name => field(name).value;
  return (value('set') === '' || row.set === value('set'))
    && (value('step') === '' || row.step === Number(value('step')))
    && (value('mark') === '' || row.marks.includes(value('mark')))
    && (value('finish') === '' || row.finish === value('finish'))
    && within(row.reward, value('low'), value('high'))
    && within(row.length, value('short'), value('long'))
    && [row.prompt, row.response, ...turns(row).map(turn => turn.content)]
      .some(text => text.includes(value('text')));
}

// Ascending orders; a row without the number comes last.
const number = (value, sign) => value === null ? Infinity : sign * value;
const ORDERS = {
  '': row => -row.step,
  oldest: row => row.step,
  worst: row => number(row.reward, 1),
  best: row => number(row.reward, -1),
  longest: row => number(row.length, -1),
  shortest: row => number(row.length, 1),
};

function chosen() {
  let found;
  if (only.group !== null) found = rows.filter(row => groupOf(row) === groupOf(rows[only.group]));
  else if (only.prompt !== null) {
    const {prompt, set} = rows[only.prompt];
    found = rows.filter(row => row.prompt === prompt && row.set === set);
  } else found = rows.filter(matches);
  const order = ORDERS[field('sort').value] ?? ORDERS[''];
  // Sorting is stable, so equal rows stay in the order of the file.
  return found.sort((a, b) => order(a) === order(b) ? 0 : order(a) - order(b));
}

function element(parent, tag, kind, text) {
  const made = parent.appendChild(document.createElement(tag));
  made.className = kind;
  made.textContent = text;
  return made;
}

function button(parent, kind, text, action) {
  element(parent, 'button', kind, text).addEventListener('click', () => {
    limit = SHOWN;
    action();
    show();
  });
}

const short = value => String(Number(value.toPrecision(4)));

function factsOf(row, isInGroup) {
  const facts = [`reward ${row.reward === null ? 'failed' : row.reward}`];
  if (!isInGroup) facts.unshift(`step ${row.step}`, row.set);
  for (const [name, value] of Object.entries(row.components))
    facts.push(`${name} ${value === null ? 'failed' : short(value)}`);
  if (row.advantage !== null) facts.push(`advantage ${short(row.advantage)}`);
  if (row.length !== null) facts.push(`${row.length} tokens`);
  if (row.finish !== null) facts.push(row.finish);
  return [...facts, ...row.marks];
}

function speak(sample, turn, row) {
  const box = element(sample, 'div', `turn ${turn.role}`, '');
  const facts = [turn.role, `${turn.tokens} tokens`];
  if (row.set === 'training')
    facts.push(turn.role === 'policy' && row.reward !== null ? 'learned from' : 'not learned from');
  element(box, 'div', 'facts', facts.join(' · '));
  element(box, 'p', '', turn.content);
  for (const call of turn.calls) element(box, 'p', 'call', `tool call: ${call}`);
}

function showSample(parent, row, isInGroup) {
  const sample = element(parent, 'div', 'sample', '');
  element(sample, 'div', 'facts', factsOf(row, isInGroup).join(' · '));
  if (row.failure !== null) {
    const filtered = row.failure.startsWith('filtered: ');
    element(sample, 'div', 'facts', filtered ? row.failure : `failed: ${row.failure}`);
  }
  if (row.turns === null) {
    if (!isInGroup) element(sample, 'p', 'prompt', row.prompt);
    element(sample, 'p', 'response', row.response);
  } else for (const turn of row.turns) speak(sample, turn, row);
  if (row.truth !== null && !isInGroup) element(sample, 'div', 'facts', `ground truth: ${row.truth}`);
  if (isInGroup) return;
  if (row.group !== null && only.group === null)
    button(sample, 'beside', 'its group side by side', () => { only = {prompt: null, group: rows.indexOf(row)}; });
  if (only.prompt === null)
    button(sample, 'over', 'this prompt over steps', () => { only = {prompt: rows.indexOf(row), group: null}; });
}

// All samples of a prompt in one step, each in a column of its own below the prompt.
function showGroup(list, first) {
  const members = rows.filter(row => groupOf(row) === groupOf(first));
  const group = element(list, 'div', 'group', '');
  const rewards = members.map(row => row.reward).filter(value => value !== null);
  const facts = [`step ${first.step}`, first.set,
    `${members.length} of ${first.group === null ? members.length : first.group_size} samples of the prompt`];
  if (rewards.length > 0)
    facts.push(`reward ${short(Math.min(...rewards))} to ${short(Math.max(...rewards))}`
      + `, mean ${short(rewards.reduce((sum, value) => sum + value) / rewards.length)}`);
  element(group, 'div', 'facts', facts.join(' · '));
  element(group, 'p', 'prompt', first.prompt);
  if (first.truth !== null) element(group, 'div', 'facts', `ground truth: ${first.truth}`);
  const columns = element(group, 'div', 'columns', '');
  for (const row of members) showSample(columns, row, true);
}

// Of the selected set and step: how many of their samples this page has.
function keptText() {
  const set = field('set').value, step = field('step').value;
  const selected = counts.filter(count => (set === '' || count.set === set)
    && (step === '' || count.step === Number(step)));
  const sum = key => selected.reduce((total, count) => total + count[key], 0);
  const name = [step === '' ? 'all steps' : `step ${step}`, ...(set === '' ? [] : [set])].join(', ');
  return `This page has ${sum('shown').toLocaleString('en')} of ${sum('stored').toLocaleString('en')} samples of ${name}.`;
}

function show() {
  const list = field('list'), found = chosen();
  const isGrouped = only.group !== null || field('view').value === 'groups';
  list.replaceChildren();
  const alone = only.group !== null ? ' (one group)' : only.prompt !== null ? ' (one prompt over steps)' : '';
  field('count').textContent = `${found.length} of ${rows.length} samples${alone}`;
  field('kept').textContent = keptText();
  field('all').hidden = alone === '';

  let more = found.length > limit;
  if (isGrouped) {
    const groups = new Map();
    for (const row of found) if (!groups.has(groupOf(row))) groups.set(groupOf(row), row);
    more = groups.size > limit;
    for (const row of [...groups.values()].slice(0, limit)) showGroup(list, row);
  } else for (const row of found.slice(0, limit)) showSample(list, row, false);
  field('more').hidden = !more;
  writeAddress();
}

function writeAddress() {
  const address = new URLSearchParams();
  for (const name of FILTERS) if (field(name).value !== '') address.set(name, field(name).value);
  for (const name of ['prompt', 'group']) if (only[name] !== null) address.set(name, only[name]);
  const text = address.toString();
  if (text !== location.hash.replace(/^#/, '')) history.replaceState(null, '', `#${text}`);
}

function readAddress() {
  const address = new URLSearchParams(location.hash.replace(/^#/, ''));
  for (const name of FILTERS) field(name).value = address.get(name) ?? '';
  for (const name of ['prompt', 'group']) {
    const row = Number(address.get(name) ?? NaN);
    only[name] = row in rows ? row : null;
  }
  limit = SHOWN;
  show();
}

for (const name of FILTERS)
  field(name).addEventListener('input', () => { limit = SHOWN; show(); });
field('all').addEventListener('click', () => { only = {prompt: null, group: null}; limit = SHOWN; show(); });
field('more').addEventListener('click', () => { limit += SHOWN; show(); });
addEventListener('hashchange', readAddress);
readAddress();
}
