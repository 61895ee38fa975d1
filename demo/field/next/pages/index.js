import fs from 'fs';
import { field } from '../lib/settings';

export async function getServerSideProps() {
  const notes = JSON.parse(fs.readFileSync('notes.json', 'utf8'));
  return { props: { title: field().title, notes } };
}

export default function Page({ title, notes }) {
  return (
    <main>
      <h1>{title}</h1>
      {notes.map((text) => (
        <p key={text}>{text}</p>
      ))}
    </main>
  );
}
