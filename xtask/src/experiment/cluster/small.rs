//! Small sites for the experiments of a cluster. Each is one program of a few lines, which records
//! each request that it serves.
//!
//! Not here: the proof by its ledger (`ledger`).

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::{ask_each, host, place_on};
use crate::content::give;
use crate::content::population::UID_BASE;
use crate::lab::Lab;

/// Serves one request after the other, each a few milliseconds. It writes the begin and the end of
/// each into its site's ledger, on the storage that all nodes share. Its boot's name is made for
/// its first visitor, so that two instances of one image have two. An append of one short line is
/// atomic, and nothing is locked. A program that was stopped in the middle blocks no other.
const PROGRAM: &str = r#"
use strict;
use warnings;
use Socket;
use Time::HiRes qw(time sleep);
socket(my $server, PF_UNIX, SOCK_STREAM, 0) or die "socket: $!";
bind($server, sockaddr_un($ENV{NAGAYA_SOCKET})) or die "bind: $!";
listen($server, 512) or die "listen: $!";
$SIG{PIPE} = 'IGNORE';
my ($boot, $ledger);
my $number = 0;
sub note {
    my ($what) = @_;
    syswrite($ledger, sprintf("%s %s %d %.6f\n", $what, $boot, $number, time())) or die "ledger: $!";
}
while (accept(my $client, $server)) {
    sysread($client, my $asked, 65536) or next;
    if (!$boot) {
        open(my $random, '<', '/dev/urandom') or die "urandom: $!";
        sysread($random, my $bytes, 8) or die "urandom: $!";
        $boot = unpack('H*', $bytes);
        open($ledger, '>>', $ENV{LEDGER}) or die "ledger: $!";
    }
    $number++;
    note('begin');
    sleep($ENV{WORK_SECONDS});
    note('end');
    my $body = "served by $boot as its $number\n";
    syswrite($client, "HTTP/1.1 200 OK\r\nContent-Length: " . length($body) . "\r\nConnection: close\r\n\r\n$body");
    close($client);
}
"#;

/// A number of small sites, each with its own tenant.
pub struct SmallCluster {
    names: Vec<String>,
    dirs: Vec<PathBuf>,
    records: Vec<Value>,
}

impl SmallCluster {
    pub fn create(lab: &Lab, count: usize, work_seconds: f64) -> Result<Self> {
        let mut all = Self { names: Vec::new(), dirs: Vec::new(), records: Vec::new() };
        for index in 0..count {
            let name = format!("small-{index}");
            let dir = lab.shared().join(&name);
            fs::create_dir_all(&dir).with_context(|| format!("creating {}", dir.display()))?;
            let (program, ledger) = (dir.join("small.pl"), dir.join("ledger"));
            fs::write(&program, PROGRAM).with_context(|| format!("writing {}", program.display()))?;
            let uid = UID_BASE + u32::try_from(index).context("number of sites")?;
            give(&dir, uid)?;
            all.records.push(json!({"tenant": {"name": name, "uid": uid, "gid": uid}}));
            all.records.push(json!({"site": {
                "name": name, "tenant": name, "hosts": [host(&name)],
                "backend": {
                    "kind": "app", "command": ["/usr/bin/perl", program], "directory": dir, "start_seconds": 60,
                    "env": {"WORK_SECONDS": work_seconds.to_string(), "LEDGER": ledger}, "writable": [dir], "release": "1",
                },
            }}));
            all.names.push(name);
            all.dirs.push(dir);
        }
        Ok(all)
    }

    pub fn records(&self) -> &[Value] {
        &self.records
    }

    /// Makes all of them run on this node.
    pub fn gather(&self, lab: &Lab, node: &str) -> Result<()> {
        eprintln!("placing {} sites on {node}", self.names.len());
        self.names.iter().try_for_each(|name| place_on(lab, name, node))?;
        ask_each(lab, &self.hosts())
    }

    pub fn hosts(&self) -> Vec<String> {
        self.names.iter().map(|name| host(name)).collect()
    }

    /// Returns the text of each site's ledger; empty if it was never requested.
    pub fn ledgers(&self) -> Vec<String> {
        self.dirs.iter().map(|dir| fs::read_to_string(dir.join("ledger")).unwrap_or_default()).collect()
    }
}
