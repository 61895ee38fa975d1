//! An etcd that wants certificates, or a user and a password, and what becomes of those that are wrong or have run out.
//!
//! Not here: certificates of nodes towards each other (`nagaya-edge`).

use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::time::{Duration, Instant};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair, date_time_ymd};

use super::rig::{Access, Etcd, Node, PATIENCE, until};
use super::*;

/// Within which whoever cannot be let in must have been told so: twice what a write says it waits.
const BOUND: Duration = Duration::from_secs(12);

const USER: &str = "nagaya";
const PASSWORD: &str = "a word to pass";

struct Ca(CertifiedIssuer<'static, KeyPair>);

type Pair = (Vec<u8>, Vec<u8>);

impl Ca {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    fn pem(&self) -> Vec<u8> {
        self.0.pem().into_bytes()
    }

    fn certificate(&self, name: &str) -> Pair {
        self.certificate_until(name, 2999)
    }

    /// A certificate that holds until this year, and its key.
    fn certificate_until(&self, name: &str, year: i32) -> Pair {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.not_before = date_time_ymd(2000, 1, 1);
        params.not_after = date_time_ymd(year, 1, 1);
        let certificate = params.signed_by(&key, &self.0).unwrap();
        (certificate.pem().into_bytes(), key.serialize_pem().into_bytes())
    }

    fn access(&self, identity: Option<Pair>) -> Access {
        Access { ca: Some(self.pem()), identity, login: None }
    }
}

fn write(dir: &Path, name: &str, bytes: &[u8]) -> String {
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}

fn write_server(dir: &Path, (certificate, key): &Pair) -> [String; 2] {
    [write(dir, "server.pem", certificate), write(dir, "server.key", key)]
}

/// One member that lets in whoever shows a certificate of this authority.
fn etcd_of(ca: &Ca) -> Etcd {
    Etcd::start_by(1, |host: Ipv4Addr, dir| {
        let [certificate, key] = write_server(dir, &ca.certificate(&host.to_string()));
        let trusted = write(dir, "ca.pem", &ca.pem());
        let extra = ["--cert-file", &certificate, "--key-file", &key, "--trusted-ca-file", &trusted];
        let extra = extra.into_iter().chain(["--client-cert-auth"]).map(ToOwned::to_owned);
        (extra.collect(), ca.access(Some(ca.certificate("node"))))
    })
}

/// All that a node asks of etcd.
fn everything_works(etcd: &Etcd, node: &Node) {
    with_one_moved(etcd, node);
    node.store.present(&name("a"), "{}".into(), Duration::from_secs(5)).unwrap();
    node.until("it is seen", |store| store.presences().len() == 1);
    etcd.runtime.block_on(async {
        assert!(node.store.put_if("k", b"v".to_vec(), None).await.unwrap());
        assert_eq!(node.store.get("k").await.unwrap().unwrap().value, b"v");
    });
    assert!(node.store.allocate_uid(700).unwrap() >= 700);
    node.in_step(etcd);
    node.is_fed();
}

/// Says why this one is not let in, after some time and always the same way.
fn why_not(etcd: &Etcd, cluster: &str, access: &Access) -> ClusterError {
    let node = Node::open(&etcd.options_of(cluster, access));
    let ask = || {
        let began = Instant::now();
        let error = node.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap_err();
        assert!(began.elapsed() < BOUND, "{error} after {:?}", began.elapsed());
        error
    };
    let mut error = ask();
    // On a busy machine a handshake may take longer than the answer had time: then nothing is said of why.
    until("somebody answers", || {
        let is_silent = error.to_string().ends_with(": no answer");
        if is_silent {
            error = ask();
        }
        !is_silent
    });
    node.until("it says so", |store| store.trouble().is_some());
    assert_eq!(node.store.counts().unwrap().settings, 0);
    match error {
        TransactionError::Store(StoreError::Cluster(error)) => error,
        error => panic!("{error}"),
    }
}

#[test]
fn members_and_nodes_show_each_other_their_certificates() {
    let ca = Ca::new();
    let other = Ca::new();
    let etcd = etcd_of(&ca);
    let cluster = etcd.cluster();
    everything_works(&etcd, &etcd.node(&cluster));
    for (identity, what) in [
        (None, "nothing"),
        (Some(other.certificate("node")), "of another authority"),
        (Some(ca.certificate_until("node", 2001)), "that has run out"),
    ] {
        let error = why_not(&etcd, &cluster, &ca.access(identity));
        println!("shown a certificate {what}: {error}");
        assert!(error.code().0 == 230 && error.to_string().contains("ertificate"), "{what}: {error}");
    }
    // A member that shows a certificate of somebody else's.
    let access = Access { ca: Some(other.pem()), ..etcd.access.clone() };
    let error = why_not(&etcd, &cluster, &access);
    println!("{error}");
    assert!(error.code().0 == 230 && error.to_string().contains("certificate"), "{error}");
}

#[test]
fn broken_certificate_is_refused_before_etcd_is_asked() {
    let ca = Ca::new();
    let options = |access: &Access| EtcdOptions {
        endpoints: vec!["https://127.0.0.1:1".into()],
        cluster: "c".into(),
        ca: access.ca.clone(),
        identity: access.identity.clone(),
        login: None,
        insecure: true,
    };
    let refused = |access: &Access| {
        let (replica, _directory) = replica();
        let opened = ClusterStore::open(
            &options(access),
            RecordSigning::Unsigned,
            Arc::new(replica),
            Arc::new(|_, _| {}),
        );
        opened.err().map(|error| error.code().0)
    };
    let (certificate, key) = ca.certificate("node");
    assert_eq!(refused(&ca.access(Some((certificate.clone(), key.clone())))), None);
    assert_eq!(refused(&Access::default()), Some(232), "encrypted, and nobody to believe");
    let garbage = b"garbage".to_vec();
    for access in [
        Access { ca: Some(garbage.clone()), ..Access::default() },
        ca.access(Some((garbage.clone(), key))),
        ca.access(Some((certificate.clone(), garbage))),
        ca.access(Some((certificate, ca.certificate("node").1))),
    ] {
        assert_eq!(refused(&access), Some(232));
    }
}

#[test]
fn an_expired_member_certificate_is_reported_until_renewed() {
    let ca = Ca::new();
    let etcd = etcd_of(&ca);
    let node = etcd.node(&etcd.cluster());
    with_sites(&node, &["one"]);
    let host = node_host(&etcd);
    write_server(etcd.directory.path(), &ca.certificate_until(&host, 2001));
    etcd.kill(0);
    etcd.revive(0);
    node.until("it says so", |store| store.trouble().is_some_and(|it| it.to_string().contains("xpired")));
    let error = node.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap_err();
    assert!(error.code().0 == 230 && error.to_string().contains("xpired"), "{error}");
    assert_eq!(node.store.counts().unwrap().sites, 1, "what was known is served");
    // The member looks at its file with each connection.
    write_server(etcd.directory.path(), &ca.certificate(&host));
    node.in_step(&etcd);
    node.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap();
    node.is_fed();
}

/// The address of all members.
fn node_host(etcd: &Etcd) -> String {
    let endpoint = etcd.options("none").endpoints.remove(0);
    endpoint.trim_start_matches("https://").split(':').next().unwrap().to_owned()
}

// === User and password ===

#[derive(Clone, PartialEq, prost::Message)]
struct TwoWords {
    #[prost(string, tag = "1")]
    one: String,
    #[prost(string, tag = "2")]
    two: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Grant {
    #[prost(string, tag = "1")]
    role: String,
    #[prost(message, optional, tag = "2")]
    permission: Option<Permission>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Permission {
    /// 2: to read and to write.
    #[prost(int32, tag = "1")]
    kind: i32,
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    range_end: Vec<u8>,
}

fn login(user: &str, password: &str) -> Access {
    Access { login: Some((user.into(), password.into())), ..Access::default() }
}

fn tell(etcd: &Etcd, method: &'static str, one: &str, two: &str) {
    let _: wire::EmptyResponse = etcd.ask(method, TwoWords { one: one.into(), two: two.into() });
}

fn grant(etcd: &Etcd, role: &str) {
    let prefix = "/nagaya/";
    let permission = Permission { kind: 2, key: prefix.into(), range_end: keys::after_all(prefix) };
    let grant = Grant { role: role.into(), permission: Some(permission) };
    let _: wire::EmptyResponse = etcd.ask("/etcdserverpb.Auth/RoleGrantPermission", grant);
}

/// From now on etcd wants a login. `nagaya` may read and write our keys, `guest` nothing.
fn protect(etcd: &mut Etcd) {
    for (user, role) in [("root", "root"), (USER, USER), ("guest", "guest")] {
        tell(etcd, "/etcdserverpb.Auth/UserAdd", user, PASSWORD);
        tell(etcd, "/etcdserverpb.Auth/RoleAdd", role, "");
        tell(etcd, "/etcdserverpb.Auth/UserGrantRole", user, role);
    }
    grant(etcd, USER);
    tell(etcd, "/etcdserverpb.Auth/AuthEnable", "", "");
    etcd.access = login("root", PASSWORD);
}

#[test]
fn a_user_is_let_in_and_stays_in_when_etcd_forgets_the_login() {
    let mut etcd = Etcd::start(1);
    protect(&mut etcd);
    let cluster = etcd.cluster();
    let node = Node::open(&etcd.options_of(&cluster, &login(USER, PASSWORD)));
    everything_works(&etcd, &node);
    // Logins live in the member's memory.
    etcd.kill(0);
    etcd.revive(0);
    node.in_step(&etcd);
    node.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap();
    let confirmed = etcd.runtime.block_on(node.store.confirm(&name("b"), "2", PATIENCE)).unwrap();
    assert!(matches!(confirmed, RecordOwner::Ours { .. }), "{confirmed:?}");
    node.until("it is there", |store| store.presences().len() == 1);
    node.is_fed();
}

#[test]
fn callers_with_little_time_do_not_block_each_others_login() {
    const AT_ONCE: usize = 20;
    let mut etcd = Etcd::start(1);
    protect(&mut etcd);
    let cluster = etcd.cluster();
    let node = Node::open(&etcd.options_of(&cluster, &login(USER, PASSWORD)));
    node.in_step(&etcd);
    etcd.runtime.block_on(node.store.join(record("a", "1"))).unwrap();
    // As a node's right to serve is asked for: over and over, and worth nothing when late.
    let ask = || {
        let confirms = (0..AT_ONCE).map(|_| {
            let store = node.store.clone();
            etcd.runtime
                .spawn(async move { store.confirm(&name("a"), "1", Duration::from_millis(300)).await })
        });
        let confirms: Vec<_> = confirms.collect();
        let answers = confirms.into_iter().map(|confirm| etcd.runtime.block_on(confirm).unwrap());
        answers.filter(Result::is_ok).count()
    };
    for _ in 0..3 {
        etcd.kill(0);
        etcd.revive(0);
        until("all have an answer", || ask() == AT_ONCE);
    }
}

#[test]
fn refused_user_is_told_so_and_goes_on_once_permitted() {
    let mut etcd = Etcd::start(1);
    let before = etcd.cluster();
    let open = etcd.node(&before);
    with_sites(&open, &["one"]);
    protect(&mut etcd);
    let cluster = etcd.cluster();
    for (access, what) in [
        (Access::default(), "password"),
        (login(USER, "wrong"), "password"),
        (login("nobody", PASSWORD), "password"),
        (login("guest", PASSWORD), "permission"),
    ] {
        let error = why_not(&etcd, &cluster, &access);
        println!("{error}");
        assert!(error.code().0 == 232 && error.to_string().contains(what), "{error}");
    }
    // One that was there before logins were wanted says so, and serves what it knows.
    let error = open.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap_err();
    assert_eq!(error.code().0, 232, "{error}");
    assert_eq!(open.store.counts().unwrap().sites, 1);
    let guest = Node::open(&etcd.options_of(&cluster, &login("guest", PASSWORD)));
    guest.until("it says so", |store| store.trouble().is_some());
    grant(&etcd, "guest");
    guest.in_step(&etcd);
    guest.store.transaction(vec![setting("k", "v")], ChangeMode::Merge).unwrap();
    guest.is_fed();
}
