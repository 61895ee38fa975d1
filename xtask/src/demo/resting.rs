//! A scripted visit to the demo's applications. It logs in and writes, lets them rest, and wakes
//! them. The visitor must find everything unchanged.
//!
//! Not here: the sites of files or programs (`check`), the time of a wake (the experiment `wake`).

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nagaya_records::instance::Tier;
use serde_json::Value;

use super::apps::{AppKind, AppPlace, DemoApps};
use super::visitor::{DemoVisitor, VisitorAnswer, hidden};
use crate::content::{ContentApp, LOGIN};
use crate::interrupt;
use crate::server::instance::{self, InstanceStatus};

/// Longest wait until an idle application is frozen. The demo's node waits five seconds.
const FREEZE_MAX: Duration = Duration::from_secs(30);

/// Interval of checks for that.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A person's test of an application: log in, and write something.
type Story = fn(&DemoVisitor, &str) -> Result<Vec<SeenInstance>>;

/// A page, and its expected text from then on.
struct SeenInstance {
    path: String,
    text: String,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct CountedWakes {
    pub passed: usize,
    pub skipped: usize,
}

impl CountedWakes {
    fn pass(&mut self, what: &str) {
        self.passed += 1;
        println!("ok  {what}");
    }

    fn skip(&mut self, what: &str) {
        self.skipped += 1;
        println!("SKIPPED  {what}");
    }
}

/// Visits the existing ones; the first surprise is the error.
pub fn visit(visitor: &DemoVisitor, apps: &DemoApps) -> Result<CountedWakes> {
    let mut counted = CountedWakes::default();
    let mut seen = Vec::new();
    for (place, app) in apps.hosted() {
        let pages = first_visit(visitor, place, app).with_context(|| with_log(visitor, place))?;
        counted.pass(&format!("{} ({}), logged in and written to", place.site, place.what));
        if app.backend.get("machine").is_some() {
            let guest = visitor.node.run(&["instance", "exec", "--wake", place.site, "--", "uname", "-r"])?;
            let node = rustix::system::uname().release().to_string_lossy().into_owned();
            ensure!(guest.trim() != node, "{}: its kernel is the node's", place.site);
            counted.pass(&format!("{}: its kernel is {}, the node's {node}", place.site, guest.trim()));
        }
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

/// Names the application and its last output, for an error.
fn with_log(visitor: &DemoVisitor, place: &AppPlace) -> String {
    let log = visitor.node.run(&["instance", "logs", place.site]);
    format!("{}, whose output ends with:\n{}\n", place.site, log.unwrap_or_else(|error| error.to_string()))
}

fn first_visit(visitor: &DemoVisitor, place: &AppPlace, app: &ContentApp) -> Result<Vec<SeenInstance>> {
    let host = place.host();
    let mut pages = vec![SeenInstance { path: app.page.path.into(), text: app.page.text.into() }];
    look(visitor, &host, &pages)?;
    let story: Story = match place.kind {
        AppKind::Django => django,
        AppKind::Redmine => redmine,
        AppKind::WordPress => wordpress,
    };
    pages.extend(story(visitor, &host)?);
    look(visitor, &host, &pages)?;
    Ok(pages)
}

/// Gets all the pages. Returns the first response.
fn look(visitor: &DemoVisitor, host: &str, pages: &[SeenInstance]) -> Result<Option<VisitorAnswer>> {
    let mut first = None;
    for SeenInstance { path, text } in pages {
        interrupt::check()?;
        let answer = visitor.get(host, path)?;
        answer.expect(200, text).with_context(|| path.clone())?;
        first.get_or_insert(answer);
    }
    Ok(first)
}

fn rests_by_itself(visitor: &DemoVisitor, place: &AppPlace) -> Result<Tier> {
    let begun = Instant::now();
    loop {
        interrupt::check()?;
        let status = InstanceStatus::of(&visitor.node, place.site)?;
        if status.tier <= Tier::Frozen {
            return Ok(status.tier);
        }
        if begun.elapsed() > FREEZE_MAX {
            bail!("it does not rest: it is at {} ({:?})", status.tier, status.note);
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Lets it rest at this tier and visits it again. One that has no image rests without processes,
/// and says why.
fn from_rest(
    visitor: &DemoVisitor,
    place: &AppPlace,
    pages: &[SeenInstance],
    to: Tier,
    counted: &mut CountedWakes,
) -> Result<()> {
    // An application that rests deeper by itself does not come up on this command.
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

/// Returns why an application has no image: because of its behaviour, or because this machine takes
/// none.
fn no_image(visitor: &DemoVisitor, status: &InstanceStatus) -> Result<String> {
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

/// Submits a form of the page `form`: its hidden field `token`, and `fields`. The response is a
/// redirection.
fn submit(
    visitor: &DemoVisitor,
    host: &str,
    (form, token): (&str, Option<&str>),
    action: &str,
    fields: &[(&str, &str)],
) -> Result<VisitorAnswer> {
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
fn django(visitor: &DemoVisitor, host: &str) -> Result<Vec<SeenInstance>> {
    const LOGIN_PAGE: &str = "/admin/login/?next=/admin/";
    const ADD: &str = "/admin/journal/entry/add/";
    let token = Some("csrfmiddlewaretoken");
    let login = [("username", LOGIN.name), ("password", LOGIN.password)];
    submit(visitor, host, (LOGIN_PAGE, token), LOGIN_PAGE, &login)?;
    let title = words();
    let entry = [
        ("title", title.as_str()),
        ("text", "Is it still here after a rest?"),
        // It has no comments.
        ("comments-TOTAL_FORMS", "0"),
        ("comments-INITIAL_FORMS", "0"),
        ("comments-MIN_NUM_FORMS", "0"),
        ("comments-MAX_NUM_FORMS", "0"),
    ];
    submit(visitor, host, (ADD, token), ADD, &entry)?;
    visitor.get(host, "/static/admin/css/base.css")?.expect(200, "{")?;
    Ok(vec![
        SeenInstance { path: "/".into(), text: title },
        SeenInstance { path: "/admin/".into(), text: "Log out".into() },
    ])
}

/// Logs in and opens an issue.
fn redmine(visitor: &DemoVisitor, host: &str) -> Result<Vec<SeenInstance>> {
    const ISSUES: &str = "/projects/instances/issues";
    let token = Some("authenticity_token");
    let login = [("username", LOGIN.name), ("password", LOGIN.password)];
    submit(visitor, host, ("/login", token), "/login", &login)?;
    let subject = words();
    let issue = [("issue[tracker_id]", "1"), ("issue[subject]", subject.as_str())];
    submit(visitor, host, ("/projects/instances/issues/new", token), ISSUES, &issue)?;
    Ok(vec![
        SeenInstance { path: "/".into(), text: "This Redmine rests when nobody uses it".into() },
        SeenInstance { path: ISSUES.into(), text: subject },
        SeenInstance { path: "/my/account".into(), text: "My account".into() },
    ])
}

/// Logs in, comments on the first post, and writes another one as the editor in the browser does.
fn wordpress(visitor: &DemoVisitor, host: &str) -> Result<Vec<SeenInstance>> {
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
        SeenInstance { path: "/?p=1".into(), text },
        SeenInstance { path: "/".into(), text: post },
        SeenInstance { path: "/wp-admin/profile.php".into(), text: "Log Out".into() },
    ])
}
