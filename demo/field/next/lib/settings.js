// Settings are read once, at the first request, and written by a form; sessions are in memory. Pages and handlers are bundled apart,
// so that what they share is the process's.
import fs from 'fs';

export function field() {
  globalThis.field ??= { ...JSON.parse(fs.readFileSync('settings.json', 'utf8')), sessions: new Map() };
  return globalThis.field;
}

export function change(title) {
  field().title = title;
  fs.writeFileSync('settings.json', JSON.stringify({ title }));
}
