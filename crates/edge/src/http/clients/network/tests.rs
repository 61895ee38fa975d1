//! Tests of networks: which addresses are one, and what is remembered of them.

use std::net::IpAddr;

use super::*;
use crate::http::clients::rate::RateLimit;

fn prefix(address: &str) -> ClientPrefix {
    ClientPrefix::new(address.parse::<IpAddr>().unwrap(), 32, 64)
}

#[test]
fn an_address_is_in_the_network_of_its_prefix() {
    let rows = [
        ("192.0.2.7", 32, 64, "192.0.2.7/32"),
        ("::ffff:192.0.2.7", 32, 64, "192.0.2.7/32"),
        ("192.0.2.7", 24, 64, "192.0.2.0/24"),
        ("192.0.2.7", 0, 64, "0.0.0.0/0"),
        ("2001:db8:1:2:3:4:5:6", 32, 64, "2001:db8:1:2::/64"),
        ("2001:db8:1:2:3:4:5:6", 32, 48, "2001:db8:1::/48"),
        ("2001:db8:1:2:3:4:5:6", 32, 128, "2001:db8:1:2:3:4:5:6/128"),
    ];
    for (address, ipv4, ipv6, shown) in rows {
        let prefix = ClientPrefix::new(address.parse().unwrap(), ipv4, ipv6);
        assert_eq!(prefix.to_string(), shown, "{address}");
    }
    assert_eq!(prefix("2001:db8::1"), prefix("2001:db8::ffff"));
    assert_ne!(prefix("2001:db8::1"), prefix("2001:db8:0:1::1"));
    assert_ne!(prefix("192.0.2.1"), prefix("192.0.2.2"));
}

#[test]
fn a_network_holds_as_many_places_as_it_may() {
    let networks = ClientNetworks::default();
    let network = networks.find(prefix("192.0.2.1"));
    let held: Vec<_> = (0..3).map(|_| network.take_place(3).unwrap()).collect();
    assert!(network.take_place(3).is_none());
    assert!(networks.find(prefix("192.0.2.2")).take_place(3).is_some(), "another one has its own");
    drop(held);
    assert_eq!(network.open.load(Ordering::Relaxed), 0);
    assert!((0..100).map(|_| network.take_place(0)).all(|place| place.is_some()), "0 is no limit");
}

#[test]
fn threads_count_one_network_together() {
    let networks = Arc::new(ClientNetworks::default());
    let rate = RateLimit { per_second: 1, burst: 100 };
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let networks = Arc::clone(&networks);
            std::thread::spawn(move || {
                let network = networks.find(prefix("2001:db8::1"));
                (0..100).filter(|_| network.requests.take(0, rate).is_ok()).count()
            })
        })
        .collect();
    let passed: usize = threads.into_iter().map(|thread| thread.join().unwrap()).sum();
    assert_eq!(passed, 100);
}

#[test]
fn memory_of_networks_without_connections_is_bounded() {
    let networks = ClientNetworks::default();
    let slow = RateLimit { per_second: 1, burst: 10 };
    let held = networks.find(prefix("2001:db8:ffff::1"));
    let _place = held.take_place(0);
    let now_ns = networks.now_ns();
    for n in 0..3 * (SHARDS * SHARD_NETWORKS_MAX) as u128 {
        let bits = u128::from("2001:db8::".parse::<Ipv6Addr>().unwrap()) | n << 64;
        // It owes something, so that it is not forgotten for nothing.
        let network = networks.find(ClientPrefix::new(IpAddr::from(Ipv6Addr::from(bits)), 32, 64));
        network.requests.take(now_ns + 3_600_000_000_000, slow).unwrap();
    }
    assert!(networks.len() <= SHARDS * SHARD_NETWORKS_MAX + SHARDS, "{}", networks.len());
    let again = networks.find(held.prefix());
    assert!(Arc::ptr_eq(&held, &again), "who has a connection open is never forgotten");
}

#[test]
fn calm_networks_are_forgotten_with_time() {
    let networks = ClientNetworks::default();
    for n in 0..100_u8 {
        networks.find(ClientPrefix::new(IpAddr::from([192, 0, 2, n]), 32, 64));
    }
    let busy = networks.find(prefix("192.0.2.200"));
    let _place = busy.take_place(0);
    (0..SHARDS / SHARDS_SWEPT).for_each(|round| networks.sweep(round));
    assert_eq!(networks.len(), 1);
}
