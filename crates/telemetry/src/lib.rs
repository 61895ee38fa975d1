//! Counters, gauges and histograms that cost a few nanoseconds to change, and the text that a
//! scraper reads.
//!
//! A metric is declared once, with all values of its labels. The caller gets a handle that adds to
//! an array by index, in the part of the calling thread. So a request takes no lock, looks up no
//! label and shares no cache line with another thread.
//!
//! Metrics of tenants, nodes and the like have labels that no declaration knows. Their owner counts
//! them, and fills a [`MetricPage`] when a scraper asks.
//!
//! Not here: the metrics themselves; each crate declares its own in its `metrics.rs`.

mod page;
mod registry;
mod series;
mod shards;

pub use page::{HistogramSample, MetricFamily, MetricPage, MetricValue};
pub use registry::{LabelDimension, Registry};
pub use series::{Counter, CounterFamily, Gauge, Histogram};
