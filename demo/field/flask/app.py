"""Notes in Flask: settings are read once at the start, and written by a form. Sessions are in signed cookies."""
import json
import sqlite3

from flask import Flask, request, session

app = Flask(__name__)
with open("secret-key") as key:
    app.secret_key = key.read()
with open("settings.json") as file:
    settings = json.load(file)


@app.get("/")
def page():
    with sqlite3.connect("notes.sqlite") as database:
        notes = database.execute("SELECT text FROM notes").fetchall()
    return f"<h1>{settings['title']}</h1>" + "".join(f"<p>{text}" for (text,) in notes)


@app.post("/login")
def login():
    session["name"] = request.form["name"]
    return "logged in"


@app.get("/me")
def me():
    return f"logged in as {session.get('name', 'nobody')}"


@app.post("/settings")
def change():
    settings["title"] = request.form["title"]
    with open("settings.json", "w") as file:
        json.dump(settings, file)
    return "changed"
