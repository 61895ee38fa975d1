//! The classes and methods rules use.
//!
//! Each file has the methods of one family and their list; what is shorter in Ruby is in `prelude/`. Not here: how a
//! native is declared and called (`native`).

mod apache;
mod cgroup;
pub mod compatibility;
mod complaint;
mod constants;
mod dsl;
mod kvs;
mod nginx;
mod request;
mod units;

pub use self::complaint::complain;
use crate::native::{Native, Prelude};

/// Names that are modules; every other name a native belongs to is a class.
pub const MODULES: &[&str] = &["Cgroup", "KVS", "Kernel", "Nagaya"];

/// `Apache` and `Nginx` come before what is inside them, because they are classes.
pub const NATIVES: &[&[Native]] =
    &[apache::NATIVES, nginx::NATIVES, cgroup::NATIVES, kvs::NATIVES, dsl::NATIVES];

/// Integers by class or module and name.
pub const CONSTANTS: &[(&str, &str, i64)] = constants::ALL;

/// Run in this order.
pub const PRELUDE: &[Prelude] = &[
    Prelude { file: "prelude/gaps.rb", source: include_str!("../../prelude/gaps.rb") },
    Prelude { file: "prelude/cgroup.rb", source: include_str!("../../prelude/cgroup.rb") },
    Prelude { file: "prelude/apache.rb", source: include_str!("../../prelude/apache.rb") },
    Prelude { file: "prelude/nginx.rb", source: include_str!("../../prelude/nginx.rb") },
    Prelude { file: "prelude/words.rb", source: include_str!("../../prelude/words.rb") },
];
