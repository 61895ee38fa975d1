// Notes in Express: settings are read once at the start, and written by a form. Sessions are in memory, as express-session has
// them by itself.
const fs = require('fs');
const express = require('express');
const session = require('express-session');

const settings = JSON.parse(fs.readFileSync('settings.json', 'utf8'));
const notes = JSON.parse(fs.readFileSync('notes.json', 'utf8'));

const app = express();
app.use(express.urlencoded({ extended: false }));
app.use(session({ secret: fs.readFileSync('secret-key', 'utf8'), resave: false, saveUninitialized: false }));

app.get('/', (request, response) => {
  response.send(`<h1>${settings.title}</h1>` + notes.map((text) => `<p>${text}`).join(''));
});

app.post('/login', (request, response) => {
  request.session.name = request.body.name;
  response.send('logged in');
});

app.get('/me', (request, response) => {
  response.send(`logged in as ${request.session.name || 'nobody'}`);
});

app.post('/settings', (request, response) => {
  settings.title = request.body.title;
  fs.writeFileSync('settings.json', JSON.stringify(settings));
  response.send('changed');
});

app.listen(process.env.NAGAYA_SOCKET);
