//! The times of each site's application, by their parts: histograms for `/metrics`, and the usual
//! time of each part for `nagaya explain`.
//!
//! Only requests whose split is known count. Not here: the split of one request (`turnaround`).

use std::collections::HashMap;

use foldhash::fast::RandomState;
use nagaya_records::SiteName;
use nagaya_telemetry::{HistogramSample, MetricPage};
use parking_lot::Mutex;

use crate::record::turnaround::{PARTS, Turnaround};

/// Maximum number of sites with times of their own since the process began. Each takes about 1.3 KB
/// here, and `SHOWN_MAX` of them take 52 lines of `/metrics`.
const SITES_MAX: usize = 10_000;
const SHOWN_MAX: usize = 250;

/// The label of all others. No site has such a name.
const OTHERS: &str = "(others)";

/// Upper bounds of the buckets in `/metrics`, microseconds.
const BOUNDS_US: [u64; 10] =
    [1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000];

/// Number of requests until a site has usual times.
const USUAL_MIN: u64 = 10;

/// Classes of times for the usual one: four for each power of two, up to two minutes.
const CLASSES: usize = 104;

/// Number of requests after which earlier ones count half. So the usual time follows a release.
const RECENT: u32 = 1_000;

/// The times of all sites, shared by the threads of the edge.
#[derive(Debug, Default)]
pub struct SiteTurnarounds(Mutex<TurnaroundTable>);

#[derive(Debug, Default)]
struct TurnaroundTable {
    sites: HashMap<SiteName, SiteTimes, RandomState>,
    others: PartHistograms,
}

#[derive(Debug, Default)]
struct SiteTimes {
    histograms: PartHistograms,
    usual: [RecentTimes; PARTS.len()],
}

#[derive(Debug, Default, Clone)]
struct PartHistograms([PartHistogram; PARTS.len()]);

#[derive(Debug, Default, Clone)]
struct PartHistogram {
    buckets: [u64; BOUNDS_US.len() + 1],
    sum_us: u64,
}

/// Times of one part, of which the later ones count more.
#[derive(Debug)]
struct RecentTimes {
    classes: Box<[u16; CLASSES]>,
    count: u32,
}

impl Default for RecentTimes {
    fn default() -> Self {
        Self { classes: Box::new([0; CLASSES]), count: 0 }
    }
}

impl SiteTurnarounds {
    /// Counts a request of this site. Returns the usual parts of the requests before it, unless
    /// they were too few. Their `questions` is 0.
    pub fn add(&self, site: &SiteName, turnaround: &Turnaround) -> Option<Turnaround> {
        let mut table = self.0.lock();
        let TurnaroundTable { sites, others } = &mut *table;
        if sites.len() >= SITES_MAX && !sites.contains_key(site) {
            others.add(turnaround);
            return None;
        }
        let times = match sites.get_mut(site) {
            Some(times) => times,
            None => sites.entry(site.clone()).or_default(),
        };
        let usual = times.usual();
        times.histograms.add(turnaround);
        times.usual.iter_mut().zip(turnaround.parts()).for_each(|(recent, us)| recent.add(us));
        usual
    }

    /// Adds a histogram for each site and part.
    pub fn expose(&self, page: &mut MetricPage) {
        let (mut shown, mut others) = {
            let table = self.0.lock();
            let sites = table.sites.iter().map(|(name, times)| (name.clone(), times.histograms.clone()));
            (sites.collect::<Vec<_>>(), table.others.clone())
        };
        // Those with the most requests.
        shown.sort_unstable_by_key(|(_, histograms)| std::cmp::Reverse(histograms.count()));
        for (_, rest) in shown.drain(shown.len().min(SHOWN_MAX)..) {
            others.merge(&rest);
        }
        shown.sort_unstable_by(|one, other| one.0.cmp(&other.0));
        let family = page.histograms(
            "nagaya_site_turnaround_seconds",
            "Time of requests in their application, by its part before, in, between and after databases",
        );
        let named = shown.iter().map(|(name, histograms)| (name.as_str(), histograms));
        for (site, histograms) in named.chain((others.count() > 0).then_some((OTHERS, &others))) {
            for (part, histogram) in PARTS.iter().zip(&histograms.0) {
                family.add_histogram([("site", site), ("part", *part)], histogram.sample());
            }
        }
    }
}

impl SiteTimes {
    fn usual(&self) -> Option<Turnaround> {
        if self.histograms.count() < USUAL_MIN {
            return None;
        }
        let [before_us, db_us, between_us, after_us] = self.usual.each_ref().map(RecentTimes::median_us);
        Some(Turnaround { before_us, db_us, between_us, after_us, questions: 0 })
    }
}

impl PartHistograms {
    fn add(&mut self, turnaround: &Turnaround) {
        for (histogram, us) in self.0.iter_mut().zip(turnaround.parts()) {
            let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
            histogram.buckets[bucket] += 1;
            histogram.sum_us = histogram.sum_us.saturating_add(us);
        }
    }

    fn merge(&mut self, other: &Self) {
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            own.buckets.iter_mut().zip(other.buckets).for_each(|(own, other)| *own += other);
            own.sum_us = own.sum_us.saturating_add(other.sum_us);
        }
    }

    /// Returns the number of requests. Each has all parts.
    fn count(&self) -> u64 {
        self.0[0].buckets.iter().sum()
    }
}

impl PartHistogram {
    fn sample(&self) -> HistogramSample {
        HistogramSample::of_us(&BOUNDS_US, &self.buckets, self.sum_us)
    }
}

impl RecentTimes {
    fn add(&mut self, us: u64) {
        if self.count >= RECENT {
            self.classes.iter_mut().for_each(|class| *class /= 2);
            self.count = self.classes.iter().map(|class| u32::from(*class)).sum();
        }
        self.classes[class_of(us)] += 1;
        self.count += 1;
    }

    /// Returns the median, exact to a fifth. 0 without times.
    fn median_us(&self) -> u64 {
        let mut left = self.count.div_ceil(2);
        for (class, count) in self.classes.iter().enumerate() {
            if u32::from(*count) >= left {
                return if left == 0 { 0 } else { middle_of(class) };
            }
            left -= u32::from(*count);
        }
        0
    }
}

/// Returns the class of a time: below 4 us its number, above that four for each power of two.
fn class_of(us: u64) -> usize {
    if us < 4 {
        return usize::try_from(us).unwrap_or(0);
    }
    let power = us.ilog2();
    let quarter = (us >> (power - 2)) & 3;
    (power as usize * 4 - 4 + usize::try_from(quarter).unwrap_or(0)).min(CLASSES - 1)
}

/// Returns the middle of a class.
fn middle_of(class: usize) -> u64 {
    if class < 4 {
        return class as u64;
    }
    let (power, quarter) = ((class + 4) / 4, (class % 4) as u64);
    let width = 1 << (power - 2);
    (4 + quarter) * width + width / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(after_us: u64) -> Turnaround {
        Turnaround { before_us: 3_000, db_us: 700, between_us: 0, after_us, questions: 1 }
    }

    #[test]
    fn classes_hold_each_time_within_a_fifth() {
        let mut before = 0;
        for us in (0..70_000).chain((70_000..60_000_000).step_by(9_973)) {
            let class = class_of(us);
            assert!(class >= before, "{us} falls below {before}");
            before = class;
            let middle = middle_of(class);
            assert!(middle.abs_diff(us) * 5 <= us.max(1), "{us}: {middle}");
        }
        assert_eq!(class_of(u64::MAX), CLASSES - 1);
    }

    #[test]
    fn usual_times_follow_the_later_requests() {
        let all = SiteTurnarounds::default();
        let site = SiteName::new("blog").unwrap();
        for _ in 0..USUAL_MIN {
            assert_eq!(all.add(&site, &times(10_000)), None, "too few");
        }
        let usual = all.add(&site, &times(10_000)).unwrap();
        for (part, expected) in usual.parts().into_iter().zip([3_000, 700, 0, 10_000]) {
            assert!(part.abs_diff(expected) * 5 <= expected, "{usual:?}");
        }
        for _ in 0..3 * RECENT {
            all.add(&site, &times(90_000));
        }
        let usual = all.add(&site, &times(1)).unwrap();
        assert!(usual.after_us > 70_000, "{usual:?}");
    }

    #[test]
    fn sites_above_the_bound_are_shown_together() {
        let all = SiteTurnarounds::default();
        for number in 0..SHOWN_MAX + 5 {
            let site = SiteName::new(&format!("s{number}")).unwrap();
            // The first ones have more requests than the last.
            let count = if number < SHOWN_MAX { 2 } else { 1 };
            for _ in 0..count {
                all.add(&site, &times(2_000_000));
            }
        }
        let mut page = MetricPage::default();
        all.expose(&mut page);
        let text = page.encode();
        let name = "nagaya_site_turnaround_seconds";
        for line in [
            format!("# TYPE {name} histogram"),
            format!("{name}_count{{site=\"s7\",part=\"after\"}} 2"),
            format!("{name}_sum{{site=\"s7\",part=\"after\"}} 4.0"),
            format!("{name}_bucket{{le=\"1.0\",site=\"s7\",part=\"after\"}} 0"),
            format!("{name}_bucket{{le=\"+Inf\",site=\"s7\",part=\"after\"}} 2"),
            format!("{name}_bucket{{le=\"0.0025\",site=\"s7\",part=\"before\"}} 0"),
            format!("{name}_bucket{{le=\"0.005\",site=\"s7\",part=\"before\"}} 2"),
            format!("{name}_count{{site=\"(others)\",part=\"db\"}} 5"),
        ] {
            assert!(text.lines().any(|each| each == line), "{line}\n{text:.2000}");
        }
        assert!(!text.contains(&format!("site=\"s{}\"", SHOWN_MAX + 1)));
    }
}
