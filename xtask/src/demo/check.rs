//! A scripted visit to the demo: every site with curl, as a person would, the wiki with an edit.
//!
//! Not here: starting and stopping the demo, the applications that rest (`resting`).

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::{Context as _, Result, bail, ensure};

use super::apps::DemoApps;
use super::visitor::{DemoVisitor, hidden};
use super::{resting, rule_file, uid_of};
use crate::interrupt;
use crate::server::TestServer;
use crate::server::nagaya::NagayaNode;

/// Fetches and verifies everything; the first surprise is the error.
pub fn visit(server: &TestServer, node: &NagayaNode, dir: &Path, apps: &DemoApps) -> Result<()> {
    let visitor = DemoVisitor { port: server.address.port(), jar: dir.join("cookies"), node: node.clone() };
    let steps: [(&str, Step); 9] = [
        ("front page", front),
        ("manual (static)", manual),
        ("wiki (PHP), read and edited", wiki),
        ("git (CGI)", git),
        ("cpu (CGI)", cpu),
        ("an unknown host", unknown_host),
        ("a receipt, explained", receipt),
        ("the wiki while programs burn CPU", busy),
        ("a rule edited, obeyed by the next request", edited_rule),
    ];
    for (what, step) in steps {
        interrupt::check()?;
        step(&visitor, dir).with_context(|| what.to_string())?;
        println!("ok  {what}");
    }
    let counted = resting::visit(&visitor, apps)?;
    println!("{} checks passed, {} skipped", steps.len() + counted.passed, counted.skipped);
    Ok(())
}

type Step = fn(&DemoVisitor, &Path) -> Result<()>;

fn front(visitor: &DemoVisitor, _dir: &Path) -> Result<()> {
    visitor.get("localhost", "/")?.expect(200, "wiki.localhost")
}

fn manual(visitor: &DemoVisitor, _dir: &Path) -> Result<()> {
    let page = visitor.get("manual.localhost", "/en/")?;
    page.expect(200, "Apache HTTP Server")?;
    let tag = page.header("etag").context("the page has no ETag")?;
    let same = format!("If-None-Match: {tag}");
    visitor.ask("manual.localhost", "/en/", &["--header", &same])?.expect(304, "")?;
    visitor.get("manual.localhost", "/style/css/manual.css")?.expect(200, "{")?;
    // As a hostile client sends it; curl by itself would remove the dots.
    let outside = visitor.ask("manual.localhost", "/../../writers/wiki/conf/local.php", &["--path-as-is"])?;
    ensure!(
        matches!(outside.status, 400 | 404),
        "a path out of the root was answered with {}",
        outside.status
    );
    Ok(())
}

/// Reads the start page, then writes a page as the browser's form does and reads it back.
fn wiki(visitor: &DemoVisitor, dir: &Path) -> Result<()> {
    const HOST: &str = "wiki.localhost";
    visitor.get(HOST, "/")?.expect(200, "A wiki on nagaya")?;
    visitor.get(HOST, "/lib/exe/css.php?t=dokuwiki")?.expect(200, "{")?;
    for secret in ["/data/pages/start.txt", "/conf/local.php", "/.user.ini"] {
        let answer = visitor.get(HOST, secret)?;
        ensure!(matches!(answer.status, 403 | 404), "{secret} is served: status {}", answer.status);
    }

    let form = visitor.get(HOST, "/doku.php?id=visit&do=edit")?;
    form.expect(200, "name=\"sectok\"")?;
    let text = format!("written by a visitor, process {}", std::process::id());
    let mut more: Vec<String> = vec![
        format!("wikitext======= Visit ======\n{text}"),
        "id=visit".into(),
        "do[save]=1".into(),
        "target=section".into(),
        "summary=visit".into(),
    ];
    for name in ["sectok", "date", "changecheck", "prefix", "suffix", "rev"] {
        if let Some(value) = hidden(&form.body, name) {
            more.push(format!("{name}={value}"));
        }
    }
    let fields: Vec<&str> = more.iter().flat_map(|field| ["--data-urlencode", field]).collect();
    let saved = visitor.ask(HOST, "/doku.php?id=visit", &fields)?;
    if !matches!(saved.status, 200 | 302 | 303) {
        bail!("saving was answered with {}: {}", saved.status, saved.body);
    }
    visitor.get(HOST, "/doku.php?id=visit")?.expect(200, &text)?;

    let file = dir.join("home/writers/wiki/data/pages/visit.txt");
    let meta = file.metadata().with_context(|| format!("looking at {}", file.display()))?;
    ensure!(meta.uid() == uid_of("writers"), "{} belongs to uid {}", file.display(), meta.uid());
    Ok(())
}

fn git(visitor: &DemoVisitor, _dir: &Path) -> Result<()> {
    visitor.get("git.localhost", "/")?.expect(200, "nagaya.git")?;
    visitor.get("git.localhost", "/?p=nagaya.git;a=shortlog")?.expect(200, "shortlog")?;
    visitor.get("git.localhost", "/static/gitweb.css")?.expect(200, "body")
}

fn cpu(visitor: &DemoVisitor, _dir: &Path) -> Result<()> {
    let answer = visitor.get("cpu.localhost", "/?n=1000")?;
    answer.expect(200, "counted to 1000 ")?;
    answer.expect(200, &format!("uid {}", uid_of("developers")))
}

fn unknown_host(visitor: &DemoVisitor, _dir: &Path) -> Result<()> {
    visitor.get("nobody.example", "/")?.expect(404, "")
}

/// Checks that a response shows its request's usage, and that the node explains the request by its
/// id.
fn receipt(visitor: &DemoVisitor, _dir: &Path) -> Result<()> {
    let answer = visitor.get("cpu.localhost", "/?n=50000")?;
    answer.expect(200, "counted to 50000 ")?;
    let receipt = answer.header("nagaya-receipt").context("no Nagaya-Receipt in the answer")?;
    ensure!(receipt.contains("cpu="), "a receipt without CPU time: {receipt}");
    let timing = answer.header("server-timing").context("no Server-Timing in the answer")?;
    ensure!(timing.contains("dur="), "Server-Timing without a duration: {timing}");
    let id = answer.header("x-request-id").context("no X-Request-Id in the answer")?;
    let explained = visitor.node.run(&["explain", id])?;
    ensure!(explained.contains("cpu.rb"), "the rule is not named as the reason of the limit:\n{explained}");
    Ok(())
}

/// Checks that programs which burn CPU are slowed down, none is refused, and the wiki responds
/// meanwhile.
fn busy(visitor: &DemoVisitor, _dir: &Path) -> Result<()> {
    const HOGS: usize = 6;
    std::thread::scope(|scope| {
        let hog = || visitor.get("cpu.localhost", "/?n=200000")?.expect(200, "counted to 200000 ");
        let hogs: Vec<_> = (0..HOGS).map(|_| scope.spawn(hog)).collect();
        let wiki =
            (0..5).try_for_each(|_| visitor.get("wiki.localhost", "/")?.expect(200, "A wiki on nagaya"));
        let cells = visitor.node.run(&["cells"]);
        for hog in hogs {
            hog.join().map_err(|_| anyhow::anyhow!("a visitor panicked"))??;
        }
        wiki?;
        ensure!(cells?.contains("cpu"), "the named cell is not among the cells");
        Ok(())
    })
}

fn edited_rule(visitor: &DemoVisitor, dir: &Path) -> Result<()> {
    let file = rule_file(dir);
    let before = std::fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    let write =
        |text: &str| std::fs::write(&file, text).with_context(|| format!("writing {}", file.display()));
    write("answer 403, \"not today\\n\" if request.host == \"cpu.localhost\"\n")?;
    visitor.get("cpu.localhost", "/?n=1000")?.expect(403, "not today")?;
    write("this is not Ruby (\n")?;
    visitor.get("cpu.localhost", "/?n=1000")?.expect(200, "counted to 1000 ")?;
    write(&before)?;
    visitor.get("cpu.localhost", "/?n=1000")?.expect(200, "counted to 1000 ")
}
