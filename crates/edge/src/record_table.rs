//! The records that this process knows, read by all threads and changed by one.
//!
//! Not here: how records are looked up (`records::table`), what follows from a change (`server`).

use std::sync::atomic::{AtomicU64, Ordering};

use nagaya_records::table;
use nagaya_records::table::RecordIndex;
use parking_lot::RwLock;

/// The records, and a number that grows with each change.
#[derive(Debug)]
pub struct RecordTable {
    table: RwLock<RecordIndex>,
    /// Grows with every change of records or settings. Threads then discard the data they derived
    /// from them.
    generation: AtomicU64,
}

impl Default for RecordTable {
    fn default() -> Self {
        Self { table: RwLock::new(RecordIndex::new()), generation: AtomicU64::new(1) }
    }
}

impl RecordTable {
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Makes void what threads remember of records and settings.
    pub fn raise_generation(&self) {
        self.generation.fetch_add(1, Ordering::Release);
    }

    pub fn routes(&self, host: &str) -> Vec<table::SiteMatch> {
        self.table.read().routes(host)
    }

    pub fn read<T>(&self, look: impl FnOnce(&RecordIndex) -> T) -> T {
        look(&self.table.read())
    }

    /// Changes the records as one: no request sees a part of the change.
    pub fn change<T>(&self, change: impl FnOnce(&mut RecordIndex) -> T) -> T {
        change(&mut self.table.write())
    }
}
