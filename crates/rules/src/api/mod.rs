//! The classes and methods rules use.
//!
//! Not here: how a native is declared and called (`native`).

use crate::native::{Native, Prelude};

/// Names that are modules; every other name a native belongs to is a class.
pub const MODULES: &[&str] = &[];

pub const NATIVES: &[&[Native]] = &[];

/// Integers by class or module and name.
pub const CONSTANTS: &[(&str, &str, i64)] = &[];

/// Run in this order.
pub const PRELUDE: &[Prelude] = &[];
