//! The classes and methods of rules.
//!
//! Each file has the methods of one family and their list; methods that are shorter in Ruby are in
//! `prelude/`. Not here: how a native is declared and called (`native`).

mod apache;
mod cgroup;
pub mod compatibility;
mod complaint;
mod constants;
mod dsl;
mod kvs;
mod nginx;
mod request;
mod state;
mod units;

pub use self::complaint::complain;
use crate::native::{NativeMethod, RubyPrelude};

/// Names that are modules; every other name to which a native belongs is a class.
pub const MODULES: &[&str] = &["Cgroup", "KVS", "Kernel", "Nagaya"];

/// `Apache` and `Nginx` come before their contents, because they are classes.
pub const NATIVES: &[&[NativeMethod]] =
    &[apache::NATIVES, nginx::NATIVES, cgroup::NATIVES, kvs::NATIVES, dsl::NATIVES, state::NATIVES];

/// Integers by class or module and name.
pub const CONSTANTS: &[(&str, &str, i64)] = constants::ALL;

/// Run in this order.
pub const PRELUDE: &[RubyPrelude] = &[
    RubyPrelude { file: "prelude/gaps.rb", source: include_str!("../../prelude/gaps.rb") },
    RubyPrelude { file: "prelude/cgroup.rb", source: include_str!("../../prelude/cgroup.rb") },
    RubyPrelude { file: "prelude/apache.rb", source: include_str!("../../prelude/apache.rb") },
    RubyPrelude { file: "prelude/nginx.rb", source: include_str!("../../prelude/nginx.rb") },
    RubyPrelude { file: "prelude/state.rb", source: include_str!("../../prelude/state.rb") },
    RubyPrelude { file: "prelude/words.rb", source: include_str!("../../prelude/words.rb") },
];
