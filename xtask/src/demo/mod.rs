//! `./dev demo`: real sites from Debian's packages, served until Ctrl-C, with nothing left behind.
//!
//! The front page is served first. The other sites join the running node as soon as they are made.
//!
//! Not here: the source of the sites (`content`), those that rest (`apps`), the visit by a script
//! (`check`, `resting`), traces that may be left (`traces`).

mod apps;
mod check;
mod resting;
mod traces;
mod visitor;

use std::fs;
use std::io::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::fs::{Mode, chmod};
use serde_json::json;

use self::apps::DemoApps;
use self::traces::DemoTraces;
use crate::content::{self, dokuwiki, gitweb};
use crate::process::RunningProcess;
use crate::server::StartProbe;
use crate::server::nagaya::NagayaNode;
use crate::workspace::Build;
use crate::{interrupt, workspace};

const PORT: u16 = 8080;

/// The owners of the demo's sites. The uids are above those that distributions allocate.
const TENANTS: [(&str, u32); 3] = [("library", 310_000), ("writers", 310_001), ("developers", 310_002)];

/// Time for running requests when the demo ends.
const DRAIN: &str = "1s";

struct DemoArgs {
    port: u16,
    check: bool,
    build: Build,
}

pub fn run(arguments: &[String]) -> Result<()> {
    let arguments = parse(arguments)?;
    interrupt::install()?;
    // Processes that lose their parent are adopted by this one, where they can be found.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).context("adopting orphans")?;
    let listen = addresses(arguments.port)?;
    let program = workspace::build_nagaya(arguments.build)?;
    let dir = tempfile::Builder::new().prefix("nagaya-demo-").tempdir().context("making a directory")?;
    chmod(dir.path(), Mode::from_raw_mode(0o755)).context("opening the directory to the tenants")?;
    let mut traces = DemoTraces::before(dir.path());

    let outcome = serve(&program, dir.path(), &listen, arguments.check, &mut traces);
    let place = dir.path().to_path_buf();
    dir.close().with_context(|| format!("removing {}", place.display()))?;
    let left = traces.left_behind()?;
    ensure!(left.is_empty(), "the demo left something behind:\n  {}", left.join("\n  "));
    outcome?;
    println!("\nStopped; no process, mount, cgroup or file is left.");
    Ok(())
}

fn parse(arguments: &[String]) -> Result<DemoArgs> {
    let mut parsed = DemoArgs { port: PORT, check: false, build: Build::Tested };
    let mut port_given = false;
    let mut words = arguments.iter();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--check" => parsed.check = true,
            "--release" => parsed.build = Build::Shipped,
            "--port" => {
                let port = words.next().context("--port needs a number")?;
                parsed.port = port.parse().with_context(|| format!("'{port}' is not a port"))?;
                port_given = true;
            }
            other => bail!("unknown argument '{other}': use --port N, --check or --release"),
        }
    }
    // A script has no preferred port, and the usual one may be in use.
    if parsed.check && !port_given {
        parsed.port = 0;
    }
    Ok(parsed)
}

/// Returns the loopback addresses to listen on. IPv6 is included if the machine has it: browsers
/// may try `::1` first.
fn addresses(port: u16) -> Result<Vec<SocketAddr>> {
    let first = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).with_context(|| {
        format!("port {port} of 127.0.0.1 is in use; choose another one: sudo ./dev demo --port 8081")
    })?;
    let first = first.local_addr().context("asking for the port")?;
    let mut all = vec![first];
    if let Ok(second) = TcpListener::bind((Ipv6Addr::LOCALHOST, first.port())) {
        all.push(second.local_addr().context("asking for the port")?);
    }
    Ok(all)
}

/// Serves until the visit is over, or until an interrupt. Everything that was started ends here.
fn serve(
    program: &Path,
    dir: &Path,
    listen: &[SocketAddr],
    check: bool,
    traces: &mut DemoTraces,
) -> Result<()> {
    let port = listen[0].port();
    let node = configure(program, dir, listen)?;
    content::copy_tree(&workspace::root().join("demo/rules"), &dir.join("rules"))?;
    let [(first, uid), ..] = TENANTS;
    add_tenant(&node, dir, first, uid)?;
    front(dir, port, BEING_MADE)?;
    import(&node, &[front_record()])?;
    let probe = StartProbe { host: "localhost".into(), path: "/".into() };
    let mut server = node.start(&probe)?;
    eprintln!(
        "http://127.0.0.1:{port}/ is served; the other sites join it as they are made, in {}",
        dir.display()
    );
    let served = prepare(&node, dir, port).map(|apps| {
        let visited = if check {
            check::visit(&server, &node, dir, &apps)
        } else {
            welcome(program, dir, port, &apps);
            watch(&mut server.process)
        };
        (apps, visited)
    });
    traces.node(server.process.pid());
    let left = server.process.stop();
    if !matches!(served, Ok((_, Ok(())))) {
        eprintln!("the node's log ends with:\n{}", server.process.log_end());
    }
    let (apps, visited) = served?;
    visited?;
    apps.stop()?;
    ensure!(left.is_empty(), "processes outlived the node:\n  {}", left.join("\n  "));
    Ok(())
}

/// Makes all other sites and applications, and gives them to the running node.
fn prepare(node: &NagayaNode, dir: &Path, port: u16) -> Result<DemoApps> {
    install_packages();
    let apps = DemoApps::create(dir, || sites(node, dir))?;
    apps.import(node, dir)?;
    front(dir, port, &apps.rows(port))?;
    Ok(apps)
}

/// Installs the packages of the applications. The demo goes on without applications that lack some,
/// and names them.
fn install_packages() {
    report_progress("packages of the applications");
    let setup = Command::new(workspace::root().join("dev")).args(["setup", "apps"]).status();
    if !setup.is_ok_and(|status| status.success()) {
        eprintln!("dev: not all packages of the demo's applications could be installed");
    }
}

/// Says what is being done now.
pub(crate) fn report_progress(what: &str) {
    eprintln!("preparing: {what}");
}

/// Returns the rule file that visitors may edit.
fn rule_file(dir: &Path) -> PathBuf {
    dir.join("rules/cpu.rb")
}

fn configure(program: &Path, dir: &Path, listen: &[SocketAddr]) -> Result<NagayaNode> {
    let mut config = format!(
        "# The configuration of ./dev demo.\nnode = \"demo\"\nruntime_dir = \"{0}/run\"\nstate_dir = \"{0}/state\"\n",
        dir.display()
    );
    for address in listen {
        config.push_str(&format!("\n[[listen]]\naddress = \"{address}\"\n"));
    }
    config.push_str(&format!(
        "\n[log]\naccess = \"{0}/log/access.log\"\n\n[edge.limits]\ndrain_timeout = \"{DRAIN}\"\n\n\
         [[rules]]\nphase = \"access_checker\"\nfile = \"{1}\"\n\n\
         # Clients that get a receipt with each answer.\n[receipts]\nallow = [\"127.0.0.0/8\", \"::1\"]\n\n\
         # When applications rest: soon enough to be watched.\n{2}kernels = \"{3}\"\n",
        dir.display(),
        rule_file(dir).display(),
        apps::IDLE,
        content::package_dir().display()
    ));
    NagayaNode::with_config(program, dir, listen[0], &config)
}

/// Adds tenants by command, sites by import: both ways of an operator.
fn sites(node: &NagayaNode, dir: &Path) -> Result<()> {
    for (name, uid) in TENANTS {
        let home = dir.join("home").join(name);
        if !home.exists() {
            add_tenant(node, dir, name, uid)?;
        }
        report_progress(&format!("sites of {name}"));
        fill(name, &home, uid)?;
        content::give(&home, uid)?;
    }
    import(node, &records(dir))
}

fn add_tenant(node: &NagayaNode, dir: &Path, name: &str, uid: u32) -> Result<()> {
    let home = dir.join("home").join(name);
    fs::create_dir_all(&home).with_context(|| format!("creating {}", home.display()))?;
    // Other tenants cannot even look inside; the node opens the files that it serves with the
    // tenant's own rights.
    fs::set_permissions(&home, fs::Permissions::from_mode(0o700)).context("closing a tenant's home")?;
    content::give(&home, uid)?;
    let uid_text = uid.to_string();
    let home_text = home.to_string_lossy();
    node.run(&["tenant", "add", name, "--uid", &uid_text, "--gid", &uid_text, "--home", &home_text]).map(drop)
}

fn import(node: &NagayaNode, records: &[serde_json::Value]) -> Result<()> {
    let (path, mut writer) = node.records("sites.jsonl")?;
    for record in records {
        writeln!(writer, "{record}").context("writing records")?;
    }
    writer.flush().context("writing records")?;
    drop(writer);
    node.import(&path).map(drop)
}

fn fill(tenant: &str, home: &Path, uid: u32) -> Result<()> {
    match tenant {
        "library" => {
            let packages = content::packages(&["apache2-doc".into()])?;
            content::copy_tree(&packages.join("usr/share/doc/apache2-doc/manual"), &home.join("manual"))
        }
        "writers" => dokuwiki::create(&home.join("wiki"), uid),
        _ => {
            gitweb::create(&home.join("git"), uid)?;
            content::copy_tree(&workspace::root().join("demo/cpu"), &home.join("cpu"))
        }
    }
}

/// Rows of the front page while applications are made.
const BEING_MADE: &str = "  <tr><td colspan=\"2\">are being made; load this page again in a minute\n";

/// Writes the page with links to all the others.
fn front(dir: &Path, port: u16, rows: &str) -> Result<()> {
    let front = dir.join("home/library/front");
    fs::create_dir_all(&front).with_context(|| format!("creating {}", front.display()))?;
    let page = fs::read_to_string(workspace::root().join("demo/front/index.html"));
    let page = page.context("reading the front page")?;
    let page = page.replace("@PORT@", &port.to_string()).replace("@APPS@\n", rows);
    fs::write(front.join("index.html"), page).context("writing the front page")?;
    content::give(&front, uid_of("library"))
}

fn site(name: &str, tenant: &str, hosts: &[&str], backend: serde_json::Value) -> serde_json::Value {
    json!({"site": {"name": name, "tenant": tenant, "hosts": hosts, "backend": backend}})
}

fn front_record() -> serde_json::Value {
    let hosts = ["localhost", "127.0.0.1", "[::1]"];
    site("front", "library", &hosts, json!({"kind": "static", "root": "front"}))
}

fn records(dir: &Path) -> Vec<serde_json::Value> {
    let gitweb_config = dir.join("home/developers/git/gitweb.conf");
    vec![
        site("manual", "library", &["manual.localhost"], json!({"kind": "static", "root": "manual"})),
        site(
            "wiki",
            "writers",
            &["wiki.localhost"],
            json!({"kind": "php", "root": "wiki", "index": ["doku.php"], "deny": dokuwiki::DENIED}),
        ),
        site(
            "git",
            "developers",
            &["git.localhost"],
            json!({"kind": "cgi", "root": "git/www", "env": {"GITWEB_CONFIG": gitweb_config}}),
        ),
        site(
            "cpu",
            "developers",
            &["cpu.localhost"],
            json!({"kind": "cgi", "root": "cpu", "index": ["cpu.cgi"]}),
        ),
    ]
}

fn welcome(program: &Path, dir: &Path, port: u16, apps: &DemoApps) {
    let dir = dir.display();
    println!(
        "
nagaya serves

  http://127.0.0.1:{port}/            an overview with links
  http://manual.localhost:{port}/en/  static files: the Apache manual
  http://wiki.localhost:{port}/       PHP: DokuWiki; press the pencil and edit
  http://git.localhost:{port}/        CGI: gitweb over this repository
  http://cpu.localhost:{port}/        CGI: burns CPU; ?n=1000000 for more

and applications that rest when nobody visits them, log in as {name} with {password}

{apps}
Four things to try in a second terminal:

1. Burn CPU with twenty requests at once. The wiki stays fast, and each of them is answered:

  seq 20 | xargs -P 20 -I _ curl -s 'http://cpu.localhost:{port}/?n=500000' &
  curl -s -o /dev/null -w '%{{time_total}} s\\n' http://wiki.localhost:{port}/
  {program} --config {dir}/nagaya.toml cells --watch

2. Edit the rule that slows them down. The next request obeys it:

  editor {dir}/rules/cpu.rb
  curl -s 'http://cpu.localhost:{port}/?n=500000'

3. Read a receipt, and have it explained:

  curl -si 'http://cpu.localhost:{port}/?n=200000' | grep -iE 'receipt|timing|x-request-id'
  {program} --config {dir}/nagaya.toml explain ID

4. Watch an application rest and wake. Five seconds after its last visitor it stands still; after a minute, or as long as
   its measured costs make of that (`instance show`), only its image is left. Load its page again and see that you are still
   logged in:

  {program} --config {dir}/nagaya.toml top
  {program} --config {dir}/nagaya.toml instance list
  {program} --config {dir}/nagaya.toml instance show redmine
  {program} --config {dir}/nagaya.toml instance rest redmine --to image
  curl -si http://redmine.localhost:{port}/ | grep -iE 'receipt|timing|x-request-id'
  {program} --config {dir}/nagaya.toml explain ID

Names under .localhost need no DNS: browsers and curl know them. Also

  curl -i http://manual.localhost:{port}/en/
  curl -i -H 'Host: nobody.example' http://127.0.0.1:{port}/
  ps -eo user:12,pid,args | grep -E 'php-cgi|cpu.cgi'
  tail -f {dir}/log/access.log
  {program} --config {dir}/nagaya.toml status
  {program} --config {dir}/nagaya.toml site list

Ctrl-C ends everything and removes {dir}.",
        program = program.display(),
        name = content::LOGIN.name,
        password = content::LOGIN.password,
        apps = apps.lines(port),
    );
}

/// Waits until an interrupt; fails if the node ends by itself.
fn watch(process: &mut RunningProcess) -> Result<()> {
    const LOOK: Duration = Duration::from_millis(500);
    while !interrupt::wait(LOOK) {
        ensure!(process.is_alive(), "the node ended by itself");
    }
    Ok(())
}

/// Returns a tenant's uid, for the check of the wiki's processes.
fn uid_of(tenant: &str) -> u32 {
    TENANTS.iter().find(|(name, _)| *name == tenant).map_or(0, |(_, uid)| *uid)
}
