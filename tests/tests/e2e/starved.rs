//! Neighbours that hardly get a processor, and want all of it: who else starts, wakes and ends goes on beside them.
//!
//! A process that is starved may hold a lock of the kernel that all others need. Not here: who gets which share (`cells`,
//! `request_cells`), figures.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use nagaya_tests::client::Connection;
use nagaya_tests::suite::{Suite, Tests};
use nagaya_tests::wait;
use nagaya_tests::world::World;
use serde_json::{Value, json};

use crate::programs;
use crate::resting::{add_site, builder_without_criu, get};

pub const SUITE: Suite = Suite {
    name: "starved",
    needs_root: true,
    tests: Tests::Alone(nagaya_tests::tests![applications_wake_beside_starved_tenants]),
};

const STARVED: [&str; 20] = [
    "s00", "s01", "s02", "s03", "s04", "s05", "s06", "s07", "s08", "s09", "s10", "s11", "s12", "s13", "s14",
    "s15", "s16", "s17", "s18", "s19",
];

/// Wakes of somebody else.
const WAKES: usize = 5;

/// An application that answers one request, and a process of its own that is busy until the application ends, soon after.
/// Its sandbox is made and ended again and again.
const BUSY: &str = r#"#!/usr/bin/perl
use strict;
use warnings;
use IO::Socket::UNIX;
my $server = IO::Socket::UNIX->new(Type => SOCK_STREAM, Local => $ENV{NAGAYA_SOCKET}, Listen => 64) or die "listen: $!";
if (!fork) { close $server; my $n = 0; $n++ while 1; }
while (my $client = $server->accept) {
    my $line = <$client> or next;
    while (my $field = <$client>) { last if $field eq "\r\n"; }
    print $client "HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy";
    close $client;
    exit 0;
}
"#;

fn throttled_us(world: &World, tenant: &str) -> u64 {
    let of_tenant = |cell: &Value| cell["kind"] == "tenant" && cell["path"] == tenant;
    let found = world.cells().into_iter().find(of_tenant);
    found.and_then(|cell| cell["usage"]["throttled_us"].as_u64()).unwrap_or(0)
}

fn applications_wake_beside_starved_tenants() {
    let busy = json!({ "kind": "app", "directory": "app", "command": ["./busy.pl"], "start_seconds": 300 });
    let mut builder = builder_without_criu().set("instances", "image_bytes = \"0B\"");
    for tenant in STARVED {
        builder = builder.site_of(tenant, tenant, busy.clone());
    }
    let world = builder.start();
    for tenant in STARVED {
        world.write_program(tenant, "app/busy.pl", BUSY);
        world.cli(&["tenant", "set", tenant, "--cpu", "2%", "--cpu-shares", "2"]);
    }
    world.write_program("alice", "app/app.py", programs::INSTANCE);
    let app = json!({ "kind": "app", "directory": "app", "command": ["./app.py"], "start_seconds": 300 });
    add_site(&world, "woken", app, json!({ "env": { "NAME": "woken" } }));
    let over = AtomicBool::new(false);
    let answers = AtomicUsize::new(0);
    thread::scope(|scope| {
        for tenant in STARVED {
            let world = &world;
            let over = &over;
            let answers = &answers;
            scope.spawn(move || {
                let request = format!("GET / HTTP/1.1\r\nHost: {tenant}.test\r\nConnection: close\r\n\r\n");
                while !over.load(Ordering::Relaxed) {
                    // Whether and when this one is answered is not of interest.
                    let mut connection = Connection::open(world.http());
                    if connection.try_send(&request).is_ok() && connection.try_response().is_ok() {
                        answers.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        let ended = End(&over);
        for tenant in STARVED {
            wait::until("it is starved", || throttled_us(&world, tenant) > 0);
        }
        let runs: Vec<String> = (0..WAKES)
            .map(|_| {
                let run = get(&world, "woken", "/run").expect(200).text();
                world.cli(&["instance", "stop", "woken"]);
                run
            })
            .collect();
        let mut different = runs.clone();
        different.sort();
        different.dedup();
        assert_eq!(different.len(), WAKES, "each woke it: {runs:?}");
        drop(ended);
    });
    assert!(answers.load(Ordering::Relaxed) > 0, "they began and ended meanwhile");
    world.stop();
}

/// Ends what goes on beside, also where the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
