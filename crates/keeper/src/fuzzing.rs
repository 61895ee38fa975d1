//! The keeper's parsers, as fuzz targets: input from edges, programs, tenants' files, other nodes
//! and the kernel.
//!
//! Targets assert more than the absence of panics. Pieces mean the same as the whole, and accepted
//! input is written out again unchanged. Not here: the fuzzer (`fuzz/`), clients' input
//! (`nagaya_edge::fuzzing`).

mod bases;
mod images;
mod mail;
pub(crate) mod messages;
mod programs;

use nagaya_base::fuzz::FuzzTarget;

/// All targets.
pub const TARGETS: &[FuzzTarget] = &[
    FuzzTarget { name: "keeper_ask", run: messages::read_ask, seeds: messages::asks },
    FuzzTarget { name: "keeper_answer", run: messages::read_answer, seeds: messages::answers },
    FuzzTarget { name: "sandbox_channel", run: messages::read_channel, seeds: messages::channel },
    FuzzTarget { name: "netlink_answer", run: messages::read_netlink, seeds: messages::netlink },
    FuzzTarget { name: "fastcgi_answer", run: programs::read_fastcgi, seeds: programs::fastcgi_answers },
    FuzzTarget { name: "php_gate", run: programs::read_gate, seeds: programs::gate_openings },
    FuzzTarget { name: "database_turns", run: programs::read_turns, seeds: programs::turns },
    FuzzTarget {
        name: "database_answer",
        run: programs::read_database_answer,
        seeds: programs::database_answers,
    },
    FuzzTarget { name: "program_lines", run: programs::read_log_lines, seeds: programs::log_lines },
    FuzzTarget { name: "status_line", run: programs::read_status_line, seeds: programs::status_lines },
    FuzzTarget { name: "mail_text", run: mail::read_text, seeds: mail::texts },
    FuzzTarget { name: "mail_session", run: mail::read_session, seeds: mail::sessions },
    FuzzTarget { name: "mail_server_answer", run: mail::read_server_answers, seeds: mail::server_answers },
    FuzzTarget { name: "oci_documents", run: bases::read_documents, seeds: bases::documents },
    FuzzTarget { name: "oci_layer", run: bases::read_layer, seeds: bases::layers },
    FuzzTarget { name: "oci_zstd", run: bases::read_zstd, seeds: bases::zstd_frames },
    FuzzTarget { name: "image_header", run: images::read_header, seeds: images::headers },
    FuzzTarget { name: "image_archive", run: images::read_archive, seeds: images::archives },
    FuzzTarget { name: "image_order", run: images::read_order, seeds: images::orders },
    FuzzTarget { name: "image_pagemap", run: images::read_pagemap, seeds: images::pagemaps },
    FuzzTarget { name: "image_mappings", run: images::read_mappings, seeds: images::mappings },
    FuzzTarget { name: "image_files", run: images::read_file_list, seeds: images::file_lists },
    FuzzTarget { name: "image_shm", run: images::read_shm, seeds: images::shm_lists },
    FuzzTarget { name: "image_carried", run: images::read_carried, seeds: images::carried },
    FuzzTarget { name: "criu_log", run: images::read_criu_log, seeds: images::criu_logs },
];

/// Returns the first byte, as a number from 1 on, and the rest.
fn split_step(bytes: &[u8]) -> Option<(usize, &[u8])> {
    let (step, rest) = bytes.split_first()?;
    Some((usize::from(*step).max(1), rest))
}
