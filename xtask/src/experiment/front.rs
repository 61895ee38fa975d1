//! `front`: the requests that everybody has, against the peers that everybody has, in one run.
//!
//! Each change on a request's path is judged by it. All servers run throughout, and one of them is
//! under load at a time. Not here: further cases of the same kinds (`static`, `proxy`, `php`, `h2`,
//! `isolation-overhead`).

use std::fs;
use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use crate::content::population::{HELLO, SitePopulation};
use crate::experiment::harness::{CONNECTIONS, ExperimentCase, ExperimentSetting, interleave};
use crate::experiment::{h2, isolation, php, proxy, static_files};
use crate::h2load::{HttpVersion, StreamLoad};
use crate::http::free_address;
use crate::load::{LoadSettings, LoadTarget};
use crate::plot::Chart;
use crate::report::{Bound, Goal, Report};
use crate::server::nagaya::NagayaSettings;
use crate::server::nginx::{self, NginxForm};
use crate::server::{TestServer, haproxy, make_dir};

const SITES: usize = 100_000;

/// The cost of an access log does not depend on the number of sites.
const SITES_LOGGED: usize = 1_000;

const OWN: &str = "nagaya";
const ATTACH: &str = "nagaya, rule attaches";
const NGINX: [&str; 2] = ["nginx", "nginx-names"];
const HAPROXY: &str = "haproxy";
const FPM: &str = "nginx + php-fpm";

/// One ratio: who does which case, against whom. `None`: against the faster form of nginx.
struct FrontRatio {
    key: &'static str,
    case: &'static str,
    variant: &'static str,
    peer: Option<&'static str>,
}

const RATIOS: [FrontRatio; 10] = [
    FrontRatio { key: "static_nginx", case: "hello", variant: OWN, peer: None },
    FrontRatio { key: "static_nginx_log", case: "log", variant: OWN, peer: Some(NGINX[0]) },
    FrontRatio { key: "isolated_nginx", case: "hello", variant: ATTACH, peer: None },
    FrontRatio { key: "proxy_nginx", case: "proxy", variant: OWN, peer: Some(NGINX[0]) },
    FrontRatio { key: "proxy_haproxy", case: "proxy", variant: OWN, peer: Some(HAPROXY) },
    FrontRatio { key: "php_page", case: "page", variant: OWN, peer: Some(FPM) },
    FrontRatio { key: "php_trivial", case: "trivial", variant: OWN, peer: Some(FPM) },
    FrontRatio { key: "h2_nginx_100", case: "h2, 100 streams", variant: OWN, peer: Some(NGINX[0]) },
    FrontRatio { key: "h2_nginx_1000", case: "h2, 1,000 streams", variant: OWN, peer: Some(NGINX[0]) },
    FrontRatio { key: "tls_nginx", case: "tls", variant: OWN, peer: Some(NGINX[0]) },
];

const GOALS: [Goal; 17] = [
    Goal { key: "static_nginx", bound: Bound::AtLeast(1.2), aim: 1.5 },
    Goal { key: "static_nginx_log", bound: Bound::AtLeast(1.2), aim: 1.5 },
    Goal { key: "isolated_nginx", bound: Bound::AtLeast(1.1), aim: 1.4 },
    Goal { key: "proxy_nginx", bound: Bound::AtLeast(1.05), aim: 1.2 },
    Goal { key: "proxy_haproxy", bound: Bound::AtLeast(1.0), aim: 1.1 },
    Goal { key: "php_page", bound: Bound::AtLeast(1.0), aim: 1.1 },
    Goal { key: "php_trivial", bound: Bound::AtLeast(1.1), aim: 1.3 },
    Goal { key: "h2_nginx_100", bound: Bound::AtLeast(1.0), aim: 1.2 },
    Goal { key: "h2_nginx_1000", bound: Bound::AtLeast(1.0), aim: 1.2 },
    Goal { key: "tls_nginx", bound: Bound::AtLeast(1.0), aim: 1.1 },
    Goal { key: "static_nginx_p99", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "static_nginx_log_p99", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "isolated_nginx_p99", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "proxy_nginx_p99", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "proxy_haproxy_p99", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "php_page_p99", bound: Bound::AtMost(1.1), aim: 1.0 },
    Goal { key: "php_trivial_p99", bound: Bound::AtMost(1.1), aim: 1.0 },
];

pub fn run(setting: &ExperimentSetting) -> Result<()> {
    let mut report = Report::new("front");
    let files = FileFront::start(setting)?;
    let proxies = ProxyFront::start(setting)?;
    let scripts = php::PhpPair::start(setting, &make_dir(setting.dir(), "php")?)?;
    let secure = SecureFront::start(setting)?;

    let mut cases = files.cases();
    cases.push(proxies.case());
    interleave(&mut report, setting, &setting.load(), &cases)?;
    let load = LoadSettings { connections: php::CONNECTIONS, ..setting.load() };
    interleave(&mut report, setting, &load, &scripts.cases())?;
    secure.measure(setting, &mut report)?;

    report.note("sites", json!(SITES));
    report.note(
        "load",
        json!({
            "generator": "wrk, two threads, closed loop, keep-alive; h2load, one thread, for TLS",
            "connections": {"PHP": php::CONNECTIONS, "others": CONNECTIONS},
            "seconds": setting.load().duration.as_secs(),
            "rounds": setting.rounds(),
        }),
    );
    summarise(&mut report)?;
    let chart = chart(&report);
    report.write(&setting.out, &chart, &GOALS)
}

fn summarise(report: &mut Report) -> Result<()> {
    let nginx = report.best("hello", &NGINX, "rps")?;
    report.note("static_nginx and isolated_nginx are against", json!(nginx));
    for FrontRatio { key, case, variant, peer } in RATIOS {
        let peer = peer.unwrap_or(nginx);
        report.set(key, report.ratio(case, variant, peer, "rps")?);
        report.set(format!("{key}_cpu"), report.ratio(case, variant, peer, "cpu_us_per_request")?);
        // h2load does not tell it.
        if let Ok(ratio) = report.ratio(case, variant, peer, "p99_ms") {
            report.set(format!("{key}_p99"), ratio);
        }
        report.set(format!("{key}_rps"), report.median(case, variant, "rps")?);
        report.set(format!("{key}_peer_rps"), report.median(case, peer, "rps")?);
    }
    Ok(())
}

fn chart(report: &Report) -> Chart {
    let panel =
        |title: &str, case: &str, variants: &[&str]| report.panel(title, "requests/s", case, "rps", variants);
    let two = [OWN, NGINX[0]];
    Chart {
        title: "The requests that everybody has".into(),
        subtitle: "wrk and h2load on the same cores; median, whiskers: least and greatest round".into(),
        panels: vec![
            panel("Small file of one of 100,000 sites", "hello", &[OWN, ATTACH, NGINX[0], NGINX[1]]),
            panel("With access log", "log", &two),
            panel("Proxied response of 100 bytes", "proxy", &[OWN, NGINX[0], HAPROXY]),
            panel("DokuWiki page", "page", &[OWN, FPM]),
            panel("Script of one line", "trivial", &[OWN, FPM]),
            panel("HTTP/2 over TLS, 100 streams", "h2, 100 streams", &two),
            panel("HTTP/2 over TLS, 1,000 streams", "h2, 1,000 streams", &two),
            panel("HTTP/1.1 over TLS", "tls", &two),
        ],
    }
}

/// Servers of small files.
struct FileFront {
    population: SitePopulation,
    nagaya: TestServer,
    attach: TestServer,
    nginx: [TestServer; 2],
    nagaya_logged: TestServer,
    nginx_logged: TestServer,
}

impl FileFront {
    fn start(setting: &ExperimentSetting) -> Result<Self> {
        let dir = make_dir(setting.dir(), "files")?;
        let population = SitePopulation::create(&dir, SITES)?;
        let logged = SitePopulation { count: SITES_LOGGED, ..population.clone() };
        eprintln!("starting the servers with {SITES} sites each");
        let nagaya = |name, population: &SitePopulation, settings| {
            static_files::start_nagaya(setting, (&dir, name), population, settings)
        };
        let rules = vec![("access_checker", isolation::overhead::read_figure()?)];
        Ok(Self {
            nagaya: nagaya("nagaya", &population, NagayaSettings::default())?,
            attach: nagaya("attach", &population, NagayaSettings { rules, ..NagayaSettings::default() })?,
            nginx: [
                nginx::sites(&dir.join("blocks"), &population, NginxForm::Blocks, false)?,
                nginx::sites(&dir.join("names"), &population, NginxForm::Names, false)?,
            ],
            nagaya_logged: nagaya(
                "logged",
                &logged,
                NagayaSettings { log: true, ..NagayaSettings::default() },
            )?,
            nginx_logged: nginx::sites(&dir.join("logs"), &logged, NginxForm::Blocks, true)?,
            population,
        })
    }

    fn cases(&self) -> Vec<ExperimentCase<'_>> {
        let bytes = HELLO.len() as u64;
        let target = |count: usize| LoadTarget {
            hosts: vec![self.population.host(count / 2)],
            path: "/hello.txt".into(),
            body_bytes: bytes..=bytes,
        };
        let all = vec![
            (OWN, &self.nagaya),
            (ATTACH, &self.attach),
            (NGINX[0], &self.nginx[0]),
            (NGINX[1], &self.nginx[1]),
        ];
        let logs = vec![(OWN, &self.nagaya_logged), (NGINX[0], &self.nginx_logged)];
        vec![
            ExperimentCase { name: "hello", target: target(SITES), servers: all },
            ExperimentCase { name: "log", target: target(SITES_LOGGED), servers: logs },
        ]
    }
}

/// Proxies before the same application.
struct ProxyFront {
    nagaya: TestServer,
    nginx: TestServer,
    haproxy: TestServer,
    _backend: TestServer,
}

impl ProxyFront {
    fn start(setting: &ExperimentSetting) -> Result<Self> {
        let dir = make_dir(setting.dir(), "proxy")?;
        let backend = proxy::start_backend(&dir)?;
        Ok(Self {
            nagaya: proxy::start_nagaya(setting, &dir, &backend)?,
            nginx: nginx::proxy(&dir.join("front"), backend.address)?,
            haproxy: haproxy::proxy(&dir, backend.address)?,
            _backend: backend,
        })
    }

    fn case(&self) -> ExperimentCase<'_> {
        let servers = vec![(OWN, &self.nagaya), (NGINX[0], &self.nginx), (HAPROXY, &self.haproxy)];
        ExperimentCase { name: "proxy", target: proxy::small_target(), servers }
    }
}

/// Servers of a file of 1 KiB over TLS.
struct SecureFront {
    servers: [h2::SecureServer; 2],
}

impl SecureFront {
    fn start(setting: &ExperimentSetting) -> Result<Self> {
        let dir = make_dir(setting.dir(), "secure")?;
        let root = make_dir(&dir, "files")?;
        fs::write(root.join("1k.bin"), vec![b'x'; h2::BODY_BYTES.into()]).context("writing the file")?;
        let certificate = h2::make_certificate(&dir)?;
        let address: SocketAddr = free_address()?;
        let nginx = nginx::http2(&dir.join("nginx"), &root, h2::HOST, address, &certificate)?;
        let nagaya = h2::start_nagaya(setting, &dir, &root, &certificate)?;
        Ok(Self { servers: [nagaya, h2::SecureServer { name: NGINX[0], server: nginx, address }] })
    }

    fn measure(&self, setting: &ExperimentSetting, report: &mut Report) -> Result<()> {
        let duration = setting.load().duration;
        let http1 = StreamLoad {
            version: HttpVersion::Http1,
            connections: CONNECTIONS,
            streams_per_connection: 1,
            ..h2::stream_load(CONNECTIONS, duration)
        };
        let loads = [
            ("h2, 100 streams", h2::stream_load(100, duration)),
            ("h2, 1,000 streams", h2::stream_load(1_000, duration)),
            ("tls", http1),
        ];
        h2::interleave_loads(setting, report, &self.servers, &loads)?;
        for (case, server) in
            loads.iter().flat_map(|(case, _)| self.servers.iter().map(move |s| (case, s.name)))
        {
            let errors = report.sum(case, server, "errors");
            ensure!(errors == 0.0, "{server}: {errors} errors doing {case}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_ratio_is_judged_against_its_peer() {
        let mut report = Report::new("front");
        let mut sample = |case, variant, rps| {
            for (metric, value) in [("rps", rps), ("p99_ms", 1.0), ("cpu_us_per_request", 1.0)] {
                report.sample(0, case, variant, metric, value);
            }
        };
        for FrontRatio { case, peer, .. } in RATIOS {
            sample(case, peer.unwrap_or(NGINX[0]), 100.0);
        }
        // The faster form counts.
        sample("hello", NGINX[1], 200.0);
        for case in
            ["hello", "log", "proxy", "page", "trivial", "h2, 100 streams", "h2, 1,000 streams", "tls"]
        {
            sample(case, OWN, 150.0);
        }
        sample("hello", ATTACH, 250.0);
        summarise(&mut report).unwrap();
        let table = report.table(&GOALS);
        assert_eq!(table.matches("MISSED").count(), 1, "{table}");
        assert_eq!(table.matches("reached").count(), GOALS.len() - 1, "{table}");
        assert_eq!((report.get("static_nginx"), report.get("isolated_nginx")), (Some(0.75), Some(1.25)));
    }
}
