//! The demo's applications visited by a script: logged in to and written to, then at rest, then woken by a visitor who
//! must find everything as it was.
//!
//! Not here: the sites that are files or programs (`check`), what waking takes (the experiment `wake`).

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nagaya_cmdb::instance::Tier;
use serde_json::Value;

use super::apps::{Apps, Kind, Place};
use super::visitor::{Answer, Visitor, hidden};
use crate::content::{App, LOGIN};
use crate::interrupt;
use crate::server::instance::{self, Status};

/// Longest wait until nobody's visit lets an application stand still. The demo's node waits five seconds.
const FREEZE_MAX: Duration = Duration::from_secs(30);

/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What a person would do to tell whether an application works: log in, and write something.
type Story = fn(&Visitor, &str) -> Result<Vec<Seen>>;

/// A page, and what must be on it from then on.
struct Seen {
    path: String,
    text: String,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Counted {
    pub passed: usize,
    pub skipped: usize,
}

impl Counted {
    fn pass(&mut self, what: &str) {
        self.passed += 1;
        println!("ok  {what}");
    }

    fn skip(&mut self, what: &str) {
        self.skipped += 1;
        println!("SKIPPED  {what}");
    }
}

/// Visits those that are there; the first surprise is the error.
pub fn visit(visitor: &Visitor, apps: &Apps) -> Result<Counted> {
    let mut counted = Counted::default();
    let mut seen = Vec::new();
    for (place, app) in apps.hosted() {
        let pages = first_visit(visitor, place, app).with_context(|| with_log(visitor, place))?;
        counted.pass(&format!("{} ({}), logged in and written to", place.site, place.what));
        seen.push((place, pages));
    }
    for (place, _) in &seen {
        let tier = rests_by_itself(visitor, place).with_context(|| with_log(visitor, place))?;
        counted.pass(&format!("{} rests when nobody visits it: {tier}", place.site));
    }
    for (place, pages) in &seen {
        for to in [Tier::Frozen, Tier::Image] {
            from_rest(visitor, place, pages, to, &mut counted).with_context(|| with_log(visitor, place))?;
        }
    }
    for (place, why) in apps.missing() {
        counted.skip(&format!("{}: {why}", place.site));
    }
    Ok(counted)
}

/// For an error: which application, and what it printed last.
fn with_log(visitor: &Visitor, place: &Place) -> String {
    let log = visitor.node.run(&["instance", "logs", place.site]);
    format!("{}, whose output ends with:\n{}\n", place.site, log.unwrap_or_else(|error| error.to_string()))
}

fn first_visit(visitor: &Visitor, place: &Place, app: &App) -> Result<Vec<Seen>> {
    let host = place.host();
    let mut pages = vec![Seen { path: app.page.path.into(), text: app.page.text.into() }];
    look(visitor, &host, &pages)?;
    let story: Story = match place.kind {
        Kind::Django => django,
        Kind::Redmine => redmine,
        Kind::WordPress => wordpress,
    };
    pages.extend(story(visitor, &host)?);
    look(visitor, &host, &pages)?;
    Ok(pages)
}

/// Gets all the pages. Returns the answer to the first.
fn look(visitor: &Visitor, host: &str, pages: &[Seen]) -> Result<Option<Answer>> {
    let mut first = None;
    for Seen { path, text } in pages {
        interrupt::check()?;
        let answer = visitor.get(host, path)?;
        answer.expect(200, text).with_context(|| path.clone())?;
        first.get_or_insert(answer);
    }
    Ok(first)
}

fn rests_by_itself(visitor: &Visitor, place: &Place) -> Result<Tier> {
    let begun = Instant::now();
    loop {
        interrupt::check()?;
        let status = Status::of(&visitor.node, place.site)?;
        if status.tier <= Tier::Frozen {
            return Ok(status.tier);
        }
        if begun.elapsed() > FREEZE_MAX {
            bail!("it does not rest: it is at {} ({:?})", status.tier, status.note);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Lets it rest there and visits it again. One that has no image rests without anything, and says why.
fn from_rest(
    visitor: &Visitor,
    place: &Place,
    pages: &[Seen],
    to: Tier,
    counted: &mut Counted,
) -> Result<()> {
    // What rests deeper by itself does not come up to be told.
    visitor.node.run(&["instance", "wake", place.site])?;
    let rested = instance::rest(&visitor.node, place.site, to)?;
    if rested.tier != to {
        counted.skip(&format!("{} at rest as an image: {}", place.site, no_image(visitor, &rested)?));
    }
    let woke = look(visitor, &place.host(), pages)?.context("no page was visited")?;
    let id = woke.header("x-request-id").context("no X-Request-Id in the answer")?;
    let explained = visitor.node.run(&["explain", id])?;
    ensure!(
        explained.contains(&format!("(it was {})", rested.tier)),
        "it rested at {}, and the visit's receipt says otherwise:\n{explained}",
        rested.tier
    );
    counted
        .pass(&format!("{} woken from {} by a visitor, with all that was written", place.site, rested.tier));
    Ok(())
}

/// Why an application has no image: because of what it does, or because this machine takes none.
fn no_image(visitor: &Visitor, status: &Status) -> Result<String> {
    if let Some(note) = &status.note {
        return Ok(note.clone());
    }
    let node: Value =
        serde_json::from_str(&visitor.node.run(&["status", "--json"])?).context("the status")?;
    let why = node["keeper"]["instances"]["images"]["none"].as_str();
    why.map(Into::into).context("it has no image, and nothing says why")
}

// === What is written ===

fn words() -> String {
    format!("Written by process {}", std::process::id())
}

/// Fills in a form that is on the page `form`: its hidden field `token`, and `fields`. The answer leads elsewhere.
fn submit(
    visitor: &Visitor,
    host: &str,
    (form, token): (&str, Option<&str>),
    action: &str,
    fields: &[(&str, &str)],
) -> Result<Answer> {
    let page = visitor.get(host, form)?;
    page.expect(200, "<form").with_context(|| form.to_owned())?;
    let mut filled: Vec<String> = fields.iter().map(|(name, value)| format!("{name}={value}")).collect();
    if let Some(token) = token {
        let value = hidden(&page.body, token).with_context(|| format!("no field {token} at {form}"))?;
        filled.push(format!("{token}={value}"));
    }
    let more: Vec<&str> = filled.iter().flat_map(|field| ["--data-urlencode", field]).collect();
    let answer = visitor.ask(host, action, &more)?;
    let said: String = answer.body.chars().take(1000).collect();
    ensure!(answer.status == 302, "{action} was answered with {}: {said}", answer.status);
    Ok(answer)
}

/// Logs in to the admin and writes an entry there.
fn django(visitor: &Visitor, host: &str) -> Result<Vec<Seen>> {
    const LOGIN_PAGE: &str = "/admin/login/?next=/admin/";
    const ADD: &str = "/admin/journal/entry/add/";
    let token = Some("csrfmiddlewaretoken");
    let login = [("username", LOGIN.name), ("password", LOGIN.password)];
    submit(visitor, host, (LOGIN_PAGE, token), LOGIN_PAGE, &login)?;
    let title = words();
    let entry = [
        ("title", title.as_str()),
        ("text", "Is it still here after a rest?"),
        // Of the comments below it: none.
        ("comments-TOTAL_FORMS", "0"),
        ("comments-INITIAL_FORMS", "0"),
        ("comments-MIN_NUM_FORMS", "0"),
        ("comments-MAX_NUM_FORMS", "0"),
    ];
    submit(visitor, host, (ADD, token), ADD, &entry)?;
    visitor.get(host, "/static/admin/css/base.css")?.expect(200, "{")?;
    Ok(vec![Seen { path: "/".into(), text: title }, Seen { path: "/admin/".into(), text: "Log out".into() }])
}

/// Logs in and opens an issue.
fn redmine(visitor: &Visitor, host: &str) -> Result<Vec<Seen>> {
    const ISSUES: &str = "/projects/instances/issues";
    let token = Some("authenticity_token");
    let login = [("username", LOGIN.name), ("password", LOGIN.password)];
    submit(visitor, host, ("/login", token), "/login", &login)?;
    let subject = words();
    let issue = [("issue[tracker_id]", "1"), ("issue[subject]", subject.as_str())];
    submit(visitor, host, ("/projects/instances/issues/new", token), ISSUES, &issue)?;
    Ok(vec![
        Seen { path: "/".into(), text: "This Redmine rests when nobody uses it".into() },
        Seen { path: ISSUES.into(), text: subject },
        Seen { path: "/my/account".into(), text: "My account".into() },
    ])
}

/// Logs in, comments on the first post, and writes another one as the editor in the browser does.
fn wordpress(visitor: &Visitor, host: &str) -> Result<Vec<Seen>> {
    const LOGIN_PAGE: &str = "/wp-login.php";
    const NONCE: &str = "createNonceMiddleware( \"";
    let login = [("log", LOGIN.name), ("pwd", LOGIN.password), ("testcookie", "1")];
    submit(visitor, host, (LOGIN_PAGE, None), LOGIN_PAGE, &login)?;
    let text = words();
    let comment = [("comment_post_ID", "1"), ("comment", text.as_str())];
    submit(visitor, host, ("/?p=1", None), "/wp-comments-post.php", &comment)?;
    let editor = visitor.get(host, "/wp-admin/post-new.php")?;
    editor.expect(200, NONCE)?;
    let nonce = editor.body.split(NONCE).nth(1).and_then(|rest| rest.split('"').next());
    let nonce = format!("X-WP-Nonce: {}", nonce.context("no nonce for posts")?);
    let post = format!("Post of process {}", std::process::id());
    let title = format!("title={post}");
    let fields = ["--header", &nonce, "--data-urlencode", &title, "--data-urlencode", "status=publish"];
    visitor.ask(host, "/index.php?rest_route=/wp/v2/posts", &fields)?.expect(201, &post)?;
    Ok(vec![
        Seen { path: "/?p=1".into(), text },
        Seen { path: "/".into(), text: post },
        Seen { path: "/wp-admin/profile.php".into(), text: "Log Out".into() },
    ])
}
