//! Certificates of nodes that have run out or do not hold yet, as those of a node whose clock is wrong.
//!
//! Not here: certificates of somebody else (`tests`), making new ones in time (`nagaya`).

use rcgen::date_time_ymd;

use super::*;
use crate::cluster::peers::pool::PeerPool;

impl Ca {
    /// The settings of a node whose certificate holds in these years.
    fn options_in(&self, node: &str, years: std::ops::Range<i32>) -> ClusterOptions {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![format!("{node}.nagaya.internal")]).unwrap();
        params.not_before = date_time_ymd(years.start, 1, 1);
        params.not_after = date_time_ymd(years.end, 1, 1);
        let certificate = params.signed_by(&key, &self.0).unwrap().pem();
        ClusterOptions { certificate, key: key.serialize_pem(), ..self.options(node, node) }
    }
}

/// What becomes of a request from `a` to `b` when their certificates hold in these years.
async fn asked(a: std::ops::Range<i32>, b: std::ops::Range<i32>) -> Result<StatusCode, String> {
    let ca = Ca::new();
    let remote = Remote::start(ca.options_in("b", b), |_| async { text("served") });
    let pool = PeerPool::new(Arc::clone(&shared(ca.options_in("a", a)).cluster));
    send(&pool, &record("b", remote.address), get()).await.map(|response| response.status)
}

const PAST: std::ops::Range<i32> = 2000..2001;
const NOW: std::ops::Range<i32> = 2000..2999;
const LATER: std::ops::Range<i32> = 2998..2999;

#[test]
fn certificate_outside_its_dates_is_refused_by_either_side() {
    run(async {
        assert_eq!(asked(NOW, NOW).await, Ok(StatusCode::OK));
        for (a, b, why) in [
            (NOW, PAST, "expired"),
            (NOW, LATER, "not valid yet"),
            (PAST, NOW, "certificate"),
            (LATER, NOW, "certificate"),
        ] {
            let error = asked(a.clone(), b.clone()).await.unwrap_err();
            println!("{a:?} asks {b:?}: {error}");
            assert!(error.to_lowercase().contains(why), "{a:?} asks {b:?}: {error}");
        }
    });
}

#[test]
fn a_node_is_let_in_again_with_its_next_certificate() {
    run(async {
        let ca = Ca::new();
        let remote = Remote::start(ca.options("b", "b"), |_| async { text("served") });
        let shared = shared(ca.options_in("a", PAST));
        let pool = PeerPool::new(Arc::clone(&shared.cluster));
        let record = record("b", remote.address);
        assert!(send(&pool, &record, get()).await.is_err());
        shared.set_options(EdgeConfig { cluster: Some(ca.options_in("a", NOW)), ..EdgeConfig::default() });
        assert_eq!(send(&pool, &record, get()).await.map(|response| response.status), Ok(StatusCode::OK));
    });
}

#[test]
fn a_certificate_forged_by_the_old_authority_is_refused() {
    run(async {
        let (old, new) = (Ca::new(), Ca::new());
        let remote = Remote::start(new.options("b", "b"), |_| async { text("served") });
        let record = record("b", remote.address);
        // Whoever has the old authority's key makes a certificate for a member, and believes the new authority itself.
        let forged = ClusterOptions { authorities: new.0.pem(), ..old.options("a", "a") };
        let pool = PeerPool::new(Arc::clone(&shared(forged).cluster));
        assert!(send(&pool, &record, get()).await.is_err());
        // The member of that name is let in by its own.
        let pool = PeerPool::new(Arc::clone(&shared(new.options("a", "a")).cluster));
        assert_eq!(send(&pool, &record, get()).await.map(|response| response.status), Ok(StatusCode::OK));
    });
}
