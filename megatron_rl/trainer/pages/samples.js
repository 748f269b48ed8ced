'use strict';
const rows = JSON.parse(document.getElementById('rows').textContent);
const field = name => document.getElementById(name);
const shown = 50;
let limit = shown, only = null;
function options(name, values) {
  for (const value of values) field(name).add(new Option(value, value));
}
const turns = row => row.turns ?? [];
const different = key => [...new Set(rows.map(row => row[key]))];
options('set', different('set'));
options('step', different('step').sort((a, b) => a - b));
options('finish', different('finish').filter(word => word !== null));
function within(value, low, high) {
  return (low === '' || (value !== null && value >= Number(low)))
    && (high === '' || (value !== null && value <= Number(high)));
}
function chosen() {
  const value = name => field(name).value;
  return rows.filter(row => only === null
    ? (value('set') === '' || row.set === value('set'))
      && (value('step') === '' || row.step === Number(value('step')))
      && (value('finish') === '' || row.finish === value('finish'))
      && within(row.reward, value('low'), value('high'))
      && within(row.length, value('short'), value('long'))
      && [row.prompt, row.response, ...turns(row).map(turn => turn.content)]
        .some(text => text.includes(value('text')))
    : row.prompt === only.prompt && row.set === only.set);
}
function element(parent, tag, kind, text) {
  const made = parent.appendChild(document.createElement(tag));
  made.className = kind;
  made.textContent = text;
  return made;
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
function show() {
  const list = field('list'), found = chosen();
  list.replaceChildren();
  field('count').textContent = `${found.length} of ${rows.length} samples`
    + (only === null ? '' : ' (one prompt over steps)');
  field('all').hidden = only === null;
  field('more').hidden = found.length <= limit;
  for (const row of found.slice(0, limit)) {
    const sample = element(list, 'div', 'sample', '');
    const facts = [`step ${row.step}`, row.set, `reward ${row.reward === null ? 'failed' : row.reward}`];
    if (row.length !== null) facts.push(`${row.length} tokens`);
    if (row.finish !== null) facts.push(row.finish);
    element(sample, 'div', 'facts', facts.join(' · '));
    if (row.failure !== null) {
      const filtered = row.failure.startsWith('filtered: ');
      element(sample, 'div', 'facts', filtered ? row.failure : `failed: ${row.failure}`);
    }
    if (row.turns === null) {
      element(sample, 'p', 'prompt', row.prompt);
      element(sample, 'p', 'response', row.response);
    } else for (const turn of row.turns) speak(sample, turn, row);
    if (row.truth !== null) element(sample, 'div', 'facts', `ground truth: ${row.truth}`);
    if (only === null) {
      const button = element(sample, 'button', 'over', 'this prompt over steps');
      button.addEventListener('click', () => { only = row; limit = shown; show(); });
    }
  }
}
for (const name of ['set', 'step', 'finish', 'low', 'high', 'short', 'long', 'text'])
  field(name).addEventListener('input', () => { limit = shown; show(); });
field('all').addEventListener('click', () => { only = null; limit = shown; show(); });
field('more').addEventListener('click', () => { limit += shown; show(); });
show();
