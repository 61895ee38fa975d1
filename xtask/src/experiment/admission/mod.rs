//! The experiments of admission: the four of paper 002, on a bulletin board like the paper's, and
//! its future work.
//!
//! Not here: clients (`crowd`), servers (`server`).

pub mod bound;
pub mod correlation;
pub mod cost;
pub mod crowd;
pub mod fair;
pub mod overflow;
pub mod prediction;
pub mod promise;

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use self::crowd::SentPost;
use crate::content;
use crate::content::population::UID_BASE;
use crate::experiment::harness::ExperimentSetting;
use crate::server::nagaya::{NagayaNode, NagayaSettings};
use crate::server::{StartProbe, TestServer};

const HOST: &str = "board.example";

const PATH: &str = "/board.cgi";

/// A bulletin board in flat files. Each message goes to the front of a file of the newest ones,
/// under a lock. The response is the page with all of them. The paper's application, ASKA BBS, is
/// of this kind.
const BOARD: &str = r#"#!/usr/bin/perl
use strict;
use warnings;
use Fcntl qw(:flock);
my $body = '';
if (($ENV{REQUEST_METHOD} // '') eq 'POST') {
    my $left = $ENV{CONTENT_LENGTH} // 0;
    while ($left > 0) {
        my $got = read(STDIN, my $part, $left);
        last unless $got;
        $body .= $part;
        $left -= $got;
    }
}
my ($text) = $body =~ /text=([^&]*)/;
open(my $lock, '>>', 'board.lock') or die "lock: $!";
flock($lock, LOCK_EX) or die "flock: $!";
my @messages;
if (open(my $in, '<', 'board.log')) {
    @messages = <$in>;
    close($in);
}
if (defined $text) {
    $text =~ tr/+/ /;
    $text =~ s/%([0-9A-Fa-f]{2})/chr(hex($1))/ge;
    $text =~ s/[\r\n]/ /g;
    unshift(@messages, time() . "\t$text\n");
    splice(@messages, 20);
    open(my $out, '>', "board.new") or die "write: $!";
    print $out @messages;
    close($out) or die "write: $!";
    rename('board.new', 'board.log') or die "rename: $!";
}
close($lock);
print "Content-Type: text/html; charset=utf-8\r\n\r\n<!doctype html><title>Board</title>\n";
for (@messages) {
    my ($at, $said) = split(/\t/, $_, 2);
    $said =~ s/&/&amp;/g;
    $said =~ s/</&lt;/g;
    $said =~ s/(https?:\/\/[\w.\/-]+)/<a href="$1">$1<\/a>/g;
    my @words = map { length($_) > 60 ? substr($_, 0, 60) . '...' : $_ } split(/ /, $said);
    print '<p>', scalar(localtime($at)), '<br>', substr(join(' ', @words), 0, 200), "</p>\n";
}
"#;

/// Makes the board in a directory that belongs to this tenant.
fn board(dir: &Path, name: &str, uid: u32) -> Result<PathBuf> {
    let root = dir.join(name);
    fs::create_dir_all(&root).with_context(|| format!("creating {}", root.display()))?;
    let file = root.join("board.cgi");
    fs::write(&file, BOARD).with_context(|| format!("writing {}", file.display()))?;
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).context("making a program executable")?;
    content::give(&root, uid)?;
    Ok(root)
}

/// Returns a message of this many bytes, as a form sends it.
fn message(bytes: usize) -> Rc<[u8]> {
    let words = "the+quick+brown+fox+jumps+over+the+lazy+dog+";
    let text: String = words.chars().cycle().take(bytes.saturating_sub(5)).collect();
    Rc::from(format!("text={text}").into_bytes())
}

fn post(server: &TestServer, host: &str, bytes: usize) -> SentPost {
    SentPost { address: server.address, host: host.into(), path: PATH.into(), body: Some(message(bytes)) }
}

/// Serves one board with these fields in its site's record.
fn serve(
    setting: &ExperimentSetting,
    name: &str,
    tables: &str,
    site: Value,
) -> Result<(NagayaNode, TestServer)> {
    let root = board(setting.dir(), &format!("{name}-board"), UID_BASE)?;
    let mut record = json!({
        "name": "board",
        "tenant": "people",
        "hosts": [HOST],
        "backend": {"kind": "cgi", "root": root, "extensions": [".cgi"]},
    });
    if let (Some(record), Value::Object(site)) = (record.as_object_mut(), site) {
        record.extend(site);
    }
    let tenant = json!({"tenant": {"name": "people", "uid": UID_BASE, "gid": UID_BASE, "home": root}});
    serve_records(setting, name, tables, &[tenant, json!({ "site": record })])
}

fn serve_records(
    setting: &ExperimentSetting,
    name: &str,
    tables: &str,
    records: &[Value],
) -> Result<(NagayaNode, TestServer)> {
    let settings = NagayaSettings { tables: tables.into(), ..NagayaSettings::default() };
    let node = NagayaNode::create(&setting.program, setting.dir(), name, settings)?;
    let (path, mut writer) = node.records("sites.jsonl")?;
    for record in records {
        writeln!(writer, "{record}").context("writing records")?;
    }
    writer.flush().context("writing records")?;
    drop(writer);
    node.import(&path)?;
    let host = records.iter().find_map(|record| record["site"]["hosts"][0].as_str()).unwrap_or(HOST);
    let server = node.start(&StartProbe { host: host.into(), path: PATH.into() })?;
    Ok((node, server))
}

/// Returns the lane of a site from the node's report.
fn lane(node: &NagayaNode, site: &str) -> Result<Value> {
    let lanes: Value = serde_json::from_str(&node.run(&["lanes", "--json"])?).context("reading the lanes")?;
    let lane = lanes.as_array().and_then(|lanes| {
        lanes.iter().find(|lane| lane["of"] == json!("site") && lane["name"] == json!(site)).cloned()
    });
    lane.with_context(|| format!("the node tells nothing of the lane of {site}"))
}

/// Without limits on waiting that would defer anybody.
const PATIENT: &str = "[admission]\ntickets = false\n";
