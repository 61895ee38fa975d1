//! nagaya from outside: the built program, real clients, real programs behind it.
//!
//! One module for each topic, each with a node that its tests share. Run one test by a part of its name:
//! `cargo test -p nagaya-tests --test e2e -- static_files::ranges`. Not here: house style (`tidy`).

mod admin_roles;
mod admission;
mod adversity;
mod any_program;
mod app;
mod balance;
mod browser;
mod cells;
mod cgi;
mod cluster;
mod conformance;
mod edge_files;
mod etcd_trust;
mod failures;
mod fastcgi;
mod fresh;
mod http1;
mod http2;
mod http_readings;
mod hung_files;
mod icmp;
mod instances;
mod lab;
mod limits;
mod lines;
mod mail;
mod membership;
mod moved_tickets;
mod networks;
mod outbound;
mod own_links;
mod own_sites;
mod partitions;
mod php;
mod programs;
mod proxy;
mod proxy_protocol;
mod receipts;
mod recipes;
mod releases;
mod request_cells;
mod resting;
mod rules;
mod service;
mod sites;
mod slow_clients;
mod slow_programs;
mod smuggling;
mod starved;
mod static_files;
mod system_calls;
mod tenants;
mod tls;
mod told;
mod turnaround;
mod watchdogs;

use std::process::ExitCode;

use nagaya_tests::suite::Order;

const ORDER: Order = Order {
    // Their programs use all processors, or a browser does.
    saturating: &[
        "rules::a_request_goes_on_in_ten_percent_of_a_core",
        "request_cells::",
        "cells::a_limit_slows_and_refuses_nobody",
        "cells::a_fork_bomb",
        "balance::",
        "browser::",
        "receipts::a_program_too_short",
        "starved::",
        // On a busy machine a worker is idle long enough between two requests to give up its share of CPU time.
        "system_calls::",
        "tls::a_browser",
    ],
    clusters: &["cluster::", "etcd_trust::", "membership::", "moved_tickets::"],
    labs: &["icmp::", "lab::", "partitions::"],
};

fn main() -> ExitCode {
    let mut suites = vec![
        static_files::SUITE,
        http1::SUITE,
        http2::SUITE,
        http_readings::SUITE,
        conformance::SUITE,
        tls::SUITE,
        proxy::SUITE,
        proxy_protocol::SUITE,
        told::SUITE,
        slow_clients::SUITE,
        networks::SUITE,
        slow_programs::SUITE,
        hung_files::SUITE,
        smuggling::SUITE,
        cgi::SUITE,
        php::SUITE,
        app::SUITE,
        instances::SUITE,
        turnaround::SUITE,
        instances::ALONE,
        fresh::SUITE,
        watchdogs::SUITE,
        recipes::SUITE,
        any_program::SUITE,
        releases::SUITE,
        own_links::SUITE,
        fastcgi::SUITE,
        outbound::SUITE,
        own_sites::SUITE,
        mail::SUITE,
        request_cells::SUITE,
        tenants::SUITE,
        edge_files::SUITE,
        edge_files::ALONE,
        admin_roles::SUITE,
        admin_roles::ALONE,
        sites::SUITE,
        limits::SUITE,
        lines::SUITE,
        admission::SUITE,
        adversity::SUITE,
        browser::SUITE,
        rules::SUITE,
        cells::SUITE,
        receipts::SUITE,
        cluster::SUITE,
        membership::SUITE,
        moved_tickets::SUITE,
        balance::SUITE,
        etcd_trust::SUITE,
        failures::SUITE,
        starved::SUITE,
        system_calls::SUITE,
        lab::SUITE,
        icmp::SUITE,
        partitions::SUITE,
    ];
    if service::is_asked_for() {
        suites.push(service::SUITE);
    }
    nagaya_tests::suite::run(suites, &ORDER)
}
