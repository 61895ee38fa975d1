//! Mail that programs of tenants send, through the relay to a real mail server (Exim), which keeps it in its queue.
//!
//! Not here: addresses and texts as such (`nagaya_keeper`'s `mail`), arguments and messages of the program (`nagaya_sendmail`).

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use nagaya_tests::suite::{Suite, Tests, skip};
use nagaya_tests::world::World;
use nagaya_tests::{machine, wait};
use serde_json::json;

pub const SUITE: Suite = Suite {
    name: "mail",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![
        mail_of_all_kinds_of_programs_reaches_the_server,
        a_tenant_sends_to_as_many_as_it_may,
        counts_outlive_a_killed_keeper,
        one_tenant_leaves_the_relay_to_others,
        mail_that_reads_as_two_messages_is_not_sent,
        without_a_server_programs_are_told_to_try_later,
        without_the_relay_programs_have_none,
    ]),
};

const EXIM: &str = "/usr/sbin/exim4";

/// A server that keeps all it takes.
struct Exim {
    process: Mutex<Child>,
    spool: PathBuf,
    port: u16,
}

impl Exim {
    fn start(dir: &Path) -> Self {
        if !Path::new(EXIM).is_file() {
            skip("there is no Exim here (Debian: exim4-daemon-light)");
        }
        let spool = dir.join("exim");
        fs::create_dir(&spool).expect("our own directory");
        machine::run("chown", &["Debian-exim:Debian-exim", &spool.to_string_lossy()]);
        // Free now; nobody else on this machine takes ports in this order.
        let port =
            TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
        let conf = dir.join("exim.conf");
        machine::write(
            &conf,
            format!(
                "primary_hostname = mx.test\nspool_directory = {0}\nlog_file_path = {0}/%slog\nqueue_only = true\n\
                 local_interfaces = 127.0.0.1\ndaemon_smtp_ports = {port}\ntls_advertise_hosts =\nhost_lookup =\n\
                 rfc1413_hosts =\nacl_smtp_rcpt = accept_all\nbegin acl\naccept_all:\n  deny domains = refused.test\n  \
                 accept\n",
                spool.display()
            ),
        );
        let log = fs::File::create(dir.join("exim.out")).expect("our own file");
        let process = Command::new(EXIM)
            .arg("-bdf")
            .arg("-C")
            .arg(&conf)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("an open file"))
            .stderr(log)
            .spawn()
            .expect("it starts");
        let exim = Self { process: Mutex::new(process), spool, port };
        wait::until("Exim listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
        exim
    }

    /// Envelopes with heads, and bodies, of what is in the queue.
    fn queue(&self) -> Vec<(String, String)> {
        let files = fs::read_dir(self.spool.join("input")).into_iter().flatten().flatten();
        files
            .filter_map(|file| {
                let head = file.path();
                // Of the name alone: a temporary directory may have the same letters in its own.
                let id = head.file_name()?.to_str()?.strip_suffix("-H")?;
                let body = head.with_file_name(format!("{id}-D"));
                let read = |path: &Path| Some(String::from_utf8_lossy(&fs::read(path).ok()?).into_owned());
                Some((read(&head)?, read(&body)?))
            })
            .collect()
    }

    /// The one message with this subject.
    #[track_caller]
    fn message(&self, subject: &str) -> (String, String) {
        let line = format!("Subject: {subject}\n");
        wait::until_some(&format!("'{subject}' is in the queue"), || {
            self.queue().into_iter().find(|(head, _)| head.contains(&line))
        })
    }
}

impl Drop for Exim {
    fn drop(&mut self) {
        let mut process = self.process.lock().expect("no holder panics");
        let _ = process.kill();
        let _ = process.wait();
    }
}

const PHP: &str = r#"<?php
$sent = mail($_GET['to'], $_GET['subject'], "Hello\n.\nworld\n", "From: Alice <alice@a.test>\r\nX-Own: 1", $_GET['more'] ?? '');
echo $sent ? 'sent' : 'not sent', ' ', ini_get('sendmail_path');
"#;

const CGI: &str = r#"#!/bin/sh
printf 'Content-Type: text/plain\r\n\r\n'
printf 'To: %s\nSubject: %s\nBcc: hidden@b.test\n\nBy CGI\n' "${QUERY_STRING#*,}" "${QUERY_STRING%%,*}" | /usr/sbin/sendmail -t -i 2>&1
echo "status $?"
"#;

/// Runs what the request's body says, with `sendmail` or by SMTP.
const APP: &str = r#"
import http.server, os, socketserver, subprocess, urllib.parse
class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        command = urllib.parse.unquote(self.path.partition('?')[2])
        done = subprocess.run(['sh', '-c', command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        body = done.stdout + b' status %d' % done.returncode
        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
    def address_string(self): return ''
Server(os.environ['NAGAYA_SOCKET'], Handler).serve_forever()
"#;

/// A node whose mail goes to this port.
fn world_of(builder: nagaya_tests::world::Builder, port: u16, more: &str) -> World {
    let app = json!({ "kind": "app", "directory": "app", "command": ["python3", "app.py"] });
    let world = builder
        .set("mail", &format!("server = \"127.0.0.1:{port}\"\n{more}"))
        .site_of("alice", "php", json!({ "kind": "php", "root": "php" }))
        .site_of("alice", "cgi", json!({ "kind": "cgi", "root": "cgi" }))
        .site_of("alice", "app", app.clone())
        .site_of("bob", "bobs", app)
        .start();
    world.write("alice", "php/mail.php", PHP);
    world.write_program("alice", "cgi/mail.cgi", CGI);
    for tenant in ["alice", "bob"] {
        world.write(tenant, "app/app.py", APP);
        world.give(tenant);
    }
    world
}

fn world() -> (World, Exim) {
    let builder = World::builder();
    let exim = Exim::start(&builder.path("."));
    let world = world_of(builder, exim.port, "");
    (world, exim)
}

/// What a command says in the application of this site.
#[track_caller]
fn run(world: &World, site: &str, command: &str) -> String {
    let encoded: String = command.bytes().map(|byte| format!("%{byte:02x}")).collect();
    world.get(&format!("{site}.test"), &format!("/?{encoded}")).expect(200).text()
}

fn send(to: &str, subject: &str) -> String {
    format!("printf 'Subject: {subject}\\n\\nBody\\n' | /run/nagaya/sendmail -i -f me@a.test {to}")
}

fn mail_of_all_kinds_of_programs_reaches_the_server() {
    let (world, exim) = world();
    let said = world.get("php.test", "/mail.php?to=you@b.test&subject=php").expect(200).text();
    assert!(said.starts_with("sent "), "{said}");
    let (head, body) = exim.message("php");
    assert!(head.contains("(tenant alice)") && head.contains("you@b.test"), "{head}");
    assert!(head.contains("X-Own: 1") && head.contains("From: Alice <alice@a.test>"), "{head}");
    assert!(body.contains("Hello\n.\nworld\n"), "{body:?}");
    assert!(head.contains("<alice@"), "the sender is the tenant's: {head}");
    let told =
        world.get("php.test", "/mail.php?to=you@b.test&subject=from&more=-fme@a.test").expect(200).text();
    assert!(told.starts_with("sent ") && exim.message("from").0.contains("<me@a.test>"), "{told}");

    if Path::new("/usr/sbin/sendmail").exists() {
        let said = world.get("cgi.test", "/mail.cgi?cgi,you@b.test").expect(200).text();
        assert_eq!(said, "status 0\n");
        let (head, _) = exim.message("cgi");
        assert!(head.contains("hidden@b.test") && !head.contains("Bcc:"), "{head}");
    }

    assert_eq!(run(&world, "app", &send("you@b.test", "app")), " status 0");
    assert!(exim.message("app").0.contains("(tenant alice, site app)"));
    // PHP in an application: php-fpm and php of the command line alike.
    let php = r#"php-cgi -i | grep -c "sendmail_path.*/run/nagaya/sendmail""#;
    assert!(run(&world, "app", php).starts_with('1'), "its settings reach PHP");
    let smtp = "python3 -c \"import smtplib; s = smtplib.SMTP('localhost', 25); s.sendmail('me@a.test', ['you@b.test'], 'Subject: smtp\\r\\n\\r\\nBody')\"";
    assert_eq!(run(&world, "app", smtp), " status 0");
    assert!(exim.message("smtp").0.contains("(tenant alice, site app)"));
    // What the server refuses the program is told.
    let refused = run(&world, "app", &send("you@refused.test", "refused"));
    assert!(refused.contains("550") && refused.ends_with(" status 69"), "{refused}");
    drop(exim);
    world.stop();
}

fn a_tenant_sends_to_as_many_as_it_may() {
    let (world, exim) = world();
    world.cli(&["tenant", "set", "alice", "--mail-per-hour", "2"]);
    let two = || run(&world, "app", &send("one@b.test two@b.test", "two"));
    wait::until("the record is known", || world.cli(&["tenant", "show", "alice"]).contains('2'));
    assert_eq!(two(), " status 0");
    exim.message("two");
    let refused = run(&world, "app", &send("three@b.test", "three"));
    assert!(refused.contains("NGY0370") && refused.ends_with(" status 75"), "{refused}");
    let said = world.get("php.test", "/mail.php?to=you@b.test&subject=php").expect(200).text();
    assert!(said.starts_with("not sent"), "its programs have one count: {said}");
    assert_eq!(run(&world, "bobs", &send("you@b.test", "bobs")), " status 0", "another tenant has its own");
    world.cli(&["tenant", "set", "bob", "--mail-per-hour", "0"]);
    wait::until("bob may send none", || {
        run(&world, "bobs", &send("you@b.test", "no")).ends_with(" status 69")
    });
    let long = run(&world, "app", "head -c 30000000 /dev/zero | /run/nagaya/sendmail -i you@b.test");
    assert!(long.contains("longer") && long.ends_with(" status 69"), "{long}");
    assert!(exim.queue().iter().all(|(head, _)| !head.contains("three@b.test")));
    drop(exim);
    world.stop();
}

fn counts_outlive_a_killed_keeper() {
    let (world, exim) = world();
    world.cli(&["tenant", "set", "alice", "--mail-per-hour", "1"]);
    let send_as = |site: &str, subject: &str| run(&world, site, &send("you@b.test", subject));
    wait::until("the bound is known", || world.cli(&["tenant", "show", "alice"]).contains("mail_per_hour"));
    assert_eq!(send_as("app", "before"), " status 0");
    exim.message("before");
    let counted = |name: &str, labels: &str| world.metric(&format!("nagaya_mail_{name}_total"), labels);
    wait::until("the message is counted", || {
        counted("messages", "tenant=\"alice\",end=\"handed_over\"") == 1.0
    });
    assert_eq!(counted("recipients", "tenant=\"alice\""), 1.0);
    assert!(counted("bytes", "tenant=\"alice\"") > 10.0);

    let keeper = world.pid_of("keeper");
    machine::signal(keeper, "KILL");
    wait::until("another keeper runs", || world.pid_of("keeper") != keeper);
    wait::until("bob's application runs again", || world.get("bobs.test", "/?true").status == 200);
    let refused = send_as("app", "after");
    assert!(refused.contains("NGY0370") && refused.ends_with(" status 75"), "{refused}");
    assert_eq!(send_as("bobs", "bobs"), " status 0", "another tenant has sent nothing");
    assert_eq!(counted("refusals", "tenant=\"alice\",reason=\"hour_recipients\""), 1.0);
    drop(exim);
    world.stop();
}

/// Opens so many connections for mail, says how each was greeted, and leaves a process that holds them.
const HOLD: &str = "python3 -c \"
import os, socket, time
held = [socket.create_connection(('127.0.0.1', 25)) for _ in range(40)]
codes = [one.recv(3).decode() for one in held]
print(codes.count('220'), codes.count('421'), end='', flush=True)
if os.fork() == 0:
    os.close(1); os.close(2)
    while True: time.sleep(60)
\"";

fn one_tenant_leaves_the_relay_to_others() {
    let builder = World::builder();
    let exim = Exim::start(&builder.path("."));
    let world = world_of(builder, exim.port, "bytes_per_hour = \"20KiB\"");
    let long = |subject: &str| {
        format!(
            "(printf 'Subject: {subject}\\n\\n'; yes 0123456789 | head -c 15000) | /run/nagaya/sendmail -i you@b.test"
        )
    };
    assert_eq!(run(&world, "app", &long("first")), " status 0");
    exim.message("first");
    let refused = run(&world, "app", &long("second"));
    assert!(refused.contains("NGY0370") && refused.ends_with(" status 75"), "{refused}");
    assert_eq!(run(&world, "bobs", &long("bobs")), " status 0", "another tenant has its own bytes");

    assert_eq!(run(&world, "app", HOLD), "32 8 status 0");
    let refused = run(&world, "app", &send("you@b.test", "third"));
    assert!(refused.contains("NGY0370") && refused.ends_with(" status 75"), "{refused}");
    assert_eq!(run(&world, "bobs", &send("you@b.test", "others")), " status 0");
    exim.message("others");
    let refusals = |reason: &str| {
        world.metric("nagaya_mail_refusals_total", &format!("tenant=\"alice\",reason=\"{reason}\""))
    };
    assert_eq!((refusals("hour_bytes"), refusals("sessions")), (1.0, 9.0));
    assert!(exim.queue().iter().all(|(head, _)| !head.contains("Subject: second")));
    drop(exim);
    world.stop();
}

fn mail_that_reads_as_two_messages_is_not_sent() {
    let (world, exim) = world();
    for (number, end) in ["\\n.\\n", "\\n.\\r\\n", "\\r\\n.\\n", "\\r.\\r\\n"].into_iter().enumerate() {
        let script = format!(
            "printf 'EHLO x\\r\\nMAIL FROM:<me@a.test>\\r\\nRCPT TO:<you@b.test>\\r\\nDATA\\r\\nSubject: bad{number}\\r\\n\\r\\nx{end}MAIL FROM:<x@a.test>\\r\\nRCPT TO:<y@b.test>\\r\\nDATA\\r\\nSubject: smuggled\\r\\n\\r\\nx\\r\\n.\\r\\nQUIT\\r\\n' | python3 -c \"
import socket, sys
s = socket.create_connection(('127.0.0.1', 25)); s.sendall(sys.stdin.buffer.read()); s.shutdown(1)
data = b''
while True:
    try: piece = s.recv(4096)
    except ConnectionResetError: break
    if not piece: break
    data += piece
print(data.decode())\""
        );
        let said = run(&world, "app", &script);
        assert!(said.contains("354 ") && !said.contains("250 OK id="), "{said}");
    }
    for address in ["<|sh>", "</etc/passwd>", "<a@b.test> ORCPT=x\\nRCPT TO:<x@b.test", "<${run{x}}@b.test>"]
    {
        let script = format!(
            "printf 'EHLO x\\r\\nMAIL FROM:<me@a.test>\\r\\nRCPT TO:{address}\\r\\nQUIT\\r\\n' | python3 -c \"
import socket, sys
s = socket.create_connection(('127.0.0.1', 25)); s.sendall(sys.stdin.buffer.read())
print(s.makefile().read())\""
        );
        let said = run(&world, "app", &script);
        assert!(said.contains("501 ") || said.contains("502 "), "{address}: {said}");
    }
    // The next one is taken, so nothing was left over.
    assert_eq!(run(&world, "app", &send("you@b.test", "after")), " status 0");
    exim.message("after");
    assert_eq!(exim.queue().len(), 1, "{:?}", exim.queue());
    drop(exim);
    world.stop();
}

fn without_a_server_programs_are_told_to_try_later() {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a port").port();
    let world = world_of(World::builder(), port, "");
    let said = run(&world, "app", &send("you@b.test", "x"));
    assert!(said.contains("NGY0371") && said.ends_with(" status 75"), "{said}");
    assert!(world.log().contains("NGY0371"), "{}", world.log());
    assert!(
        world.get("php.test", "/mail.php?to=you@b.test&subject=x").expect(200).text().starts_with("not sent")
    );
    world.stop();
}

fn without_the_relay_programs_have_none() {
    let builder = World::builder().set("keeper", "local_ports = []");
    let world = world_of(builder, 1, "relay = false");
    let said = run(
        &world,
        "app",
        "ls /run/nagaya/sendmail; python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 25), 5)'",
    );
    assert!(said.contains("No such file") && !said.ends_with(" status 0"), "{said}");
    world.stop();
}
