//! What end-to-end tests stand on: a real node in a directory of its own, clients that send exact bytes, and servers
//! that misbehave on purpose.
//!
//! It uses none of nagaya's crates: the tests see the built program as its users do, through its command line, its
//! sockets and its files. Not here: the tests themselves (`tests/`), house style (`tests/tidy.rs`, `tests/house.rs`).

pub mod backend;
pub mod calls;
pub mod client;
pub mod cluster;
pub mod corpus;
pub mod fuse;
pub mod http2;
pub mod lab;
pub mod machine;
pub mod sources;
pub mod suite;
pub mod wait;
pub mod world;
