//! Backends that answer requests: files, programs, servers and applications. Also the intake of
//! their bytes.
//!
//! In reading order: `exchange` (one request, by kind of backend), `lookup`, `files`, `programs`,
//! `upstream`, `instances`, `request_cell`.

pub mod backend_set;
pub mod boost;
pub mod cell_lease;
pub mod exchange;
pub mod files;
pub mod instances;
pub mod intake;
pub mod lookup;
pub mod named_file;
pub mod programs;
pub mod read_ahead;
pub mod request_cell;
pub mod upstream;
