//! A simulated server with clients, seeded: cores that are shared, sleeps that are not, and memory that may run short.
//!
//! Not here: what is expected of the bound (`tests`).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use crate::bound::{AdaptiveLimit, LimitSample};
use crate::{CpuPressure, Moment};

/// What a machine can do.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub cores: f64,
    /// How fast a core is.
    pub speed: f64,
    /// Time that requests sleep (wait for others), against what their kind says.
    pub sleep: f64,
    /// With more requests than this at once, memory runs short and all work slows down.
    pub memory: u32,
}

pub const TWO_CORES: Machine = Machine { cores: 2.0, speed: 1.0, sleep: 1.0, memory: u32::MAX };

/// A kind of request.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Part of the requests that are of this kind.
    pub part: f64,
    pub cpu_ms: f64,
    pub sleep_ms: f64,
}

#[derive(Debug, Clone, Copy)]
pub enum Load {
    /// So many clients, each of which asks again as soon as it was answered.
    Closed(u32),
    /// So many arrivals in a second, whatever happens to those before.
    Open(f64),
}

#[derive(Debug, Clone, Copy)]
pub enum Policy {
    Fixed(u32),
    Auto { min: u32, max: u32, feels: bool },
}

pub struct World {
    pub load: Load,
    pub kinds: Vec<Kind>,
    /// Whether the kinds can be told apart, as those of two paths can, before requests of them have ended.
    pub are_told_apart: bool,
    /// Spread of each request's needs around its kind's: 0 is none, 1 is exponential.
    pub noise: f64,
    pub machine: Machine,
    /// From this second on the machine is another one.
    pub step: Option<(f64, Machine)>,
    pub seconds: f64,
    /// What happens before is not counted.
    pub warm: f64,
    pub seed: u64,
}

/// What was seen of a run.
pub struct Outcome {
    /// Requests answered in each tenth of a second since the begin.
    pub tenths: Vec<u32>,
    /// Seconds from asking to the answer, of those who were answered after the warm-up; sorted.
    pub totals: Vec<f64>,
    /// The bound at each hundredth of a second after the warm-up.
    pub bounds: Vec<u32>,
    /// What the answers needed on an idle server, in seconds, together.
    work: f64,
    warm: f64,
    seconds: f64,
}

impl Outcome {
    /// Seconds of needs that were answered in a second.
    pub fn throughput(&self) -> f64 {
        self.work / (self.seconds - self.warm)
    }

    pub fn quantile(&self, q: f64) -> f64 {
        self.totals[((self.totals.len() - 1) as f64 * q) as usize]
    }

    /// Requests answered in a second between these seconds since the begin.
    pub fn between(&self, from: f64, to: f64) -> f64 {
        let tenths = &self.tenths[(from * 10.0) as usize..(to * 10.0) as usize];
        tenths.iter().map(|&count| f64::from(count)).sum::<f64>() / (to - from)
    }

    /// Mean of the bound, and its standard deviation.
    pub fn bound(&self) -> (f64, f64) {
        let count = self.bounds.len() as f64;
        let mean = self.bounds.iter().map(|&bound| f64::from(bound)).sum::<f64>() / count;
        let squares: f64 = self.bounds.iter().map(|&bound| (f64::from(bound) - mean).powi(2)).sum();
        (mean, (squares / count).sqrt())
    }
}

#[derive(Debug, Clone, Copy)]
struct Job {
    kind: usize,
    cpu: f64,
    sleep: f64,
    asked: f64,
    began: f64,
}

/// Times are ordered as nanoseconds.
type Agenda = BinaryHeap<Reverse<(u64, usize)>>;

fn nanos(seconds: f64) -> u64 {
    (seconds * 1e9) as u64
}

struct Simulation<'a> {
    world: &'a World,
    machine: Machine,
    random: u64,
    now: f64,
    /// CPU time that each job on the cores has got since the begin.
    shared: f64,
    on_cpu: Agenda,
    asleep: Agenda,
    jobs: Vec<Job>,
    free: Vec<usize>,
    line: VecDeque<Job>,
    running: u32,
    bound: u32,
    auto: Option<AdaptiveLimit>,
    feels: bool,
    /// Mean service of each kind as learned so far, and of how many; the last one is of all kinds.
    learned: Vec<(f64, u32)>,
    /// CPU time used, and time in which more were ready than there are cores, since the last look.
    used: f64,
    starved: f64,
    out: Outcome,
}

impl World {
    pub fn run(&self, policy: Policy) -> Outcome {
        let (auto, feels, bound) = match policy {
            Policy::Fixed(bound) => (None, false, bound),
            Policy::Auto { min, max, feels } => {
                let auto = AdaptiveLimit::new(min, max);
                let bound = auto.run();
                (Some(auto), feels, bound)
            }
        };
        let tenths = vec![0; (self.seconds * 10.0) as usize + 1];
        let out = Outcome {
            tenths,
            totals: Vec::new(),
            bounds: Vec::new(),
            work: 0.0,
            warm: self.warm,
            seconds: self.seconds,
        };
        let simulation = Simulation {
            world: self,
            machine: self.machine,
            random: self.seed,
            now: 0.0,
            shared: 0.0,
            on_cpu: Agenda::new(),
            asleep: Agenda::new(),
            jobs: Vec::new(),
            free: Vec::new(),
            line: VecDeque::new(),
            running: 0,
            bound,
            auto,
            feels,
            learned: vec![(0.0, 0); self.kinds.len() + 1],
            used: 0.0,
            starved: 0.0,
            out,
        };
        simulation.run()
    }
}

impl Simulation<'_> {
    /// Evenly between 0 and 1, without either (splitmix64).
    fn uniform(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64 + 1e-17
    }

    fn exponential(&mut self) -> f64 {
        -self.uniform().ln()
    }

    fn noisy(&mut self, mean: f64) -> f64 {
        mean * (1.0 - self.world.noise + self.world.noise * self.exponential())
    }

    fn ask(&mut self) {
        let mut pick = self.uniform();
        let mut kind = 0;
        while kind + 1 < self.world.kinds.len() && pick > self.world.kinds[kind].part {
            pick -= self.world.kinds[kind].part;
            kind += 1;
        }
        let Kind { cpu_ms, sleep_ms, .. } = self.world.kinds[kind];
        let cpu = self.noisy(cpu_ms / 1e3);
        let sleep = self.noisy(sleep_ms / 1e3);
        self.line.push_back(Job { kind, cpu, sleep, asked: self.now, began: 0.0 });
        self.start();
    }

    fn start(&mut self) {
        while self.running < self.bound {
            let Some(mut job) = self.line.pop_front() else { return };
            job.began = self.now;
            self.running += 1;
            let index = self.free.pop().unwrap_or(self.jobs.len());
            if index == self.jobs.len() {
                self.jobs.push(job);
            } else {
                self.jobs[index] = job;
            }
            self.asleep.push(Reverse((nanos(self.now + job.sleep * self.machine.sleep), index)));
        }
    }

    /// CPU seconds in a second for each that is on the cores.
    fn rate(&self) -> f64 {
        let ready = self.on_cpu.len().max(1) as f64;
        let short = f64::from(self.running) / f64::from(self.machine.memory);
        let thrift = if short > 1.0 { short.powf(-1.5) } else { 1.0 };
        self.machine.speed * thrift * (self.machine.cores / ready).min(1.0)
    }

    fn advance(&mut self, to: f64) {
        let passed = to - self.now;
        self.shared += passed * self.rate();
        self.used += passed * (self.on_cpu.len() as f64).min(self.machine.cores);
        if self.on_cpu.len() as f64 > self.machine.cores {
            self.starved += passed;
        }
        self.now = to;
    }

    fn end(&mut self, index: usize) {
        let job = self.jobs[index];
        self.free.push(index);
        let service = self.now - job.began;
        let all = self.learned.len() - 1;
        let is_known = self.world.are_told_apart && self.learned[job.kind].1 >= 10;
        let work = if is_known { self.learned[job.kind].0 / self.learned[all].0 } else { 1.0 };
        for index in [job.kind, all] {
            let (mean, count) = &mut self.learned[index];
            *count += 1;
            *mean += (service - *mean) / f64::from((*count).min(300));
        }
        self.out.tenths[(self.now * 10.0) as usize] += 1;
        if self.now > self.world.warm {
            self.out.totals.push(self.now - job.asked);
            let Kind { cpu_ms, sleep_ms, .. } = self.world.kinds[job.kind];
            self.out.work += (cpu_ms + sleep_ms) / 1e3;
        }
        let service = Some(Duration::from_secs_f64(service));
        self.observe(LimitSample { running: self.running, waiting: self.line.len() as u32, service, work });
        self.running -= 1;
        if let Load::Closed(_) = self.world.load {
            self.ask();
        }
        self.start();
    }

    fn observe(&mut self, observed: LimitSample) {
        if let Some(auto) = &mut self.auto {
            let changed = auto.observe(Moment((self.now * 1e6) as u64), observed);
            assert_eq!(changed.unwrap_or(self.bound), auto.run(), "a change is told, and only a change");
            self.bound = auto.run();
        }
    }

    fn tick(&mut self, tick: u64) {
        let world = self.world;
        if self.now > world.warm {
            self.out.bounds.push(self.bound);
        }
        if tick.is_multiple_of(10) {
            let pressure = CpuPressure {
                busy: (self.used * 10.0 / self.machine.cores) as f32,
                starved: (self.starved * 10.0) as f32,
            };
            self.used = 0.0;
            self.starved = 0.0;
            let now = Moment((self.now * 1e6) as u64);
            if let Some(auto) = self.auto.as_mut().filter(|_| self.feels) {
                auto.observe_pressure(now, pressure);
            }
            let waiting = self.line.len() as u32;
            self.observe(LimitSample { running: self.running, waiting, service: None, work: 1.0 });
            self.start();
        }
        if let Some((_, machine)) = world.step.filter(|(at, _)| self.now >= *at) {
            self.machine = machine;
        }
    }

    fn run(mut self) -> Outcome {
        let mut arrival = f64::INFINITY;
        match self.world.load {
            Load::Closed(clients) => (0..clients).for_each(|_| self.ask()),
            Load::Open(rate) => arrival = self.exponential() / rate,
        }
        let mut ticks = 1u64;
        while self.now < self.world.seconds {
            let tick = ticks as f64 / 100.0;
            let wakes = self.asleep.peek().map_or(f64::INFINITY, |Reverse((at, _))| *at as f64 / 1e9);
            let left = |at: u64| (at as f64 / 1e9 - self.shared).max(0.0) / self.rate();
            let ends = self.on_cpu.peek().map_or(f64::INFINITY, |Reverse((at, _))| self.now + left(*at));
            let next = tick.min(wakes).min(ends).min(arrival).max(self.now);
            self.advance(next);
            if next >= ends {
                let Reverse((_, index)) = self.on_cpu.pop().expect("somebody was about to end");
                self.end(index);
            } else if next >= wakes {
                let Reverse((_, index)) = self.asleep.pop().expect("somebody was about to wake");
                self.on_cpu.push(Reverse((nanos(self.shared + self.jobs[index].cpu), index)));
            } else if next >= arrival {
                if let Load::Open(rate) = self.world.load {
                    arrival = self.now + self.exponential() / rate;
                }
                self.ask();
            } else {
                self.tick(ticks);
                ticks += 1;
            }
        }
        self.out.totals.sort_by(f64::total_cmp);
        self.out
    }
}
