//! What the codec does with good and with hostile datagrams, on real sockets.
//!
//! Not here: long runs over random bytes; those are the fuzz target's (`fuzz/`).

use std::os::fd::AsFd;

use nagaya_records::cell::{
    Boost, CellChange, CellName, CellScope, CgroupController, Confinement, CpuQuota, Demotion, Device,
    IoLimit, LimitSet, NamedCell, RequestUsage,
};
use nagaya_records::instance::{Tier, WakeReport, WakeStage};
use nagaya_records::{SiteName, TenantName};
use proptest::prelude::*;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::protocol::{
    FailureKind, InstanceId, KeeperMessage, ProcessExit, ProcessId, Verb, VerbCall, VerbReply,
};

fn pair() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_message_arrives_with_its_descriptors() {
    let (ours, theirs) = pair();
    let ask = VerbCall { tag: 7, verb: Verb::OpenRoot { site: SiteName::new("wiki").unwrap() } };
    let (passed, _kept) = pair();
    send(&ours, &encode(&ask).unwrap(), &[passed.as_fd(), passed.as_fd()]).unwrap();
    let (got, fds) = receive::<VerbCall>(&theirs, &mut Vec::new()).unwrap();
    assert_eq!(got, ask);
    assert_eq!(fds.len(), 2);
}

#[test]
fn an_empty_socket_is_not_ready_and_a_closed_one_is_closed() {
    let (ours, theirs) = pair();
    assert!(matches!(receive::<VerbCall>(&theirs, &mut Vec::new()), Err(CodecError::NotReady)));
    drop(ours);
    assert!(matches!(receive::<VerbCall>(&theirs, &mut Vec::new()), Err(CodecError::Closed)));
    assert!(matches!(send(&theirs, b"x", &[]), Err(CodecError::Closed)));
}

#[test]
fn too_many_descriptors_are_refused_and_closed() {
    let (ours, theirs) = pair();
    let (passed, _kept) = pair();
    // The kernel's own limit is 253; ours is smaller, so a longer control buffer is needed to break
    // it.
    let many = [passed.as_fd(); 64];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&many)));
    let bytes = encode(&VerbCall { tag: 1, verb: Verb::Status }).unwrap();
    sendmsg(&ours, &[IoSlice::new(&bytes)], &mut control, SendFlags::empty()).unwrap();
    // Other tests of this process open descriptors too; none of them opens dozens.
    let before = open_fds();
    assert!(matches!(receive::<VerbCall>(&theirs, &mut Vec::new()), Err(CodecError::TooManyDescriptors)));
    assert!(open_fds() < before + 32);
}

#[test]
fn descriptors_of_a_message_that_does_not_decode_are_closed() {
    let (ours, theirs) = pair();
    let (passed, kept) = pair();
    send(&ours, &[0xff; 40], &[passed.as_fd()]).unwrap();
    drop(passed);
    assert!(matches!(receive::<VerbCall>(&theirs, &mut Vec::new()), Err(CodecError::Malformed(_))));
    // The other end of the passed socket sees that its last copy is gone.
    assert!(matches!(receive::<VerbCall>(&kept, &mut Vec::new()), Err(CodecError::Closed)));
}

#[test]
fn a_message_beyond_the_limit_is_refused_on_both_sides() {
    let (ours, theirs) = pair();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4 * KEEPER_MESSAGE_MAX).unwrap();
    send(&ours, &vec![0; KEEPER_MESSAGE_MAX + 1], &[]).unwrap();
    assert!(matches!(receive::<VerbCall>(&theirs, &mut Vec::new()), Err(CodecError::TooLarge)));
    send(&ours, &vec![0; KEEPER_MESSAGE_MAX + 9000], &[]).unwrap();
    assert!(matches!(receive::<VerbCall>(&theirs, &mut Vec::new()), Err(CodecError::TooLarge)));
    let verb = Verb::OpenCertificate { name: "x".repeat(KEEPER_MESSAGE_MAX) };
    assert!(matches!(encode(&VerbCall { tag: 1, verb }), Err(CodecError::TooLarge)));
}

#[test]
fn bytes_after_a_message_are_refused() {
    let mut bytes = encode(&VerbCall { tag: 3, verb: Verb::Status }).unwrap();
    bytes.push(0);
    assert!(matches!(decode::<VerbCall>(&bytes), Err(CodecError::TrailingBytes(1))));
}

#[test]
fn a_name_that_could_leave_a_directory_does_not_decode() {
    let good =
        encode(&VerbCall { tag: 1, verb: Verb::OpenRoot { site: SiteName::new("aa").unwrap() } }).unwrap();
    assert!(decode::<VerbCall>(&good).is_ok());
    let bad: Vec<u8> = good.iter().map(|b| if *b == b'a' { b'.' } else { *b }).collect();
    assert!(matches!(decode::<VerbCall>(&bad), Err(CodecError::Malformed(_))));
}

fn any_limits() -> impl Strategy<Value = LimitSet> {
    let cpu = prop::option::of(
        any::<(u64, u32)>().prop_map(|(quota_us, period_us)| CpuQuota { quota_us, period_us }),
    );
    let device = prop_oneof![
        Just(Device::Root),
        any::<(u32, u32)>().prop_map(|(major, minor)| Device::Number { major, minor })
    ];
    let io = (device, any::<[Option<u64>; 4]>()).prop_map(
        |(device, [read_bps, write_bps, read_iops, write_iops])| IoLimit {
            device,
            read_bps,
            write_bps,
            read_iops,
            write_iops,
        },
    );
    let io = proptest::collection::vec(io, 0..3);
    let list = prop::option::of(".{0,9}".prop_map(String::into_boxed_str));
    let numbers = any::<(Option<u32>, Option<u32>, Option<u64>)>();
    (cpu, io, numbers, list.clone(), list).prop_map(
        |(cpu, io, (cpu_shares, processes, memory), cpus, mems)| LimitSet {
            cpu,
            cpu_shares,
            io,
            processes,
            memory,
            cpus,
            mems,
        },
    )
}

fn any_controllers() -> impl Strategy<Value = Vec<CgroupController>> {
    proptest::collection::vec(prop::sample::select(CgroupController::ALL.to_vec()), 0..7)
}

fn any_cell_name() -> impl Strategy<Value = CellName> {
    "[A-Za-z0-9_-][A-Za-z0-9._-]{0,20}".prop_map(|name| CellName::parse(&name).unwrap())
}

fn any_confinement() -> impl Strategy<Value = Confinement> {
    let scope = prop_oneof![Just(CellScope::Node), Just(CellScope::Tenant)];
    let named = (any_cell_name(), scope, any_controllers(), prop::option::of(any_limits()))
        .prop_map(|(name, scope, controllers, limits)| NamedCell { name, scope, controllers, limits });
    let demotion =
        (any::<u64>(), any_limits()).prop_map(|(after_cpu_us, limits)| Demotion { after_cpu_us, limits });
    let lists = (proptest::collection::vec(named, 0..3), proptest::collection::vec(demotion, 0..3));
    (any_limits(), lists).prop_map(|(limits, (named, demotions))| Confinement {
        limits,
        named,
        demotions,
        boost: Boost::default(),
    })
}

fn any_change() -> impl Strategy<Value = CellChange> {
    prop_oneof![
        (any_cell_name(), any_controllers(), any_limits())
            .prop_map(|(name, controllers, limits)| CellChange::Set { name, controllers, limits }),
        (any_cell_name(), any_controllers())
            .prop_map(|(name, controllers)| CellChange::Drop { name, controllers }),
    ]
}

fn any_verb() -> impl Strategy<Value = Verb> {
    let site = "[a-z0-9][a-z0-9._-]{0,20}".prop_map(|name| SiteName::new(&name).unwrap());
    let tenant = || "[a-z0-9][a-z0-9._-]{0,20}".prop_map(|name| TenantName::new(&name).unwrap());
    let pairs = proptest::collection::vec((".{0,12}", ".{0,40}"), 0..8);
    prop_oneof![
        any::<u32>().prop_map(|version| Verb::Hello { version }),
        site.clone().prop_map(|site| Verb::OpenRoot { site }),
        (site.clone(), ".{0,40}").prop_map(|(site, path)| Verb::OpenLink { site, path }),
        site.clone().prop_map(|site| Verb::ConnectServer { site }),
        (site.clone(), ".{0,30}", pairs, any_confinement()).prop_map(|(site, script, env, confinement)| {
            Verb::SpawnCgi { site, script, env, confinement: Box::new(confinement) }
        }),
        (any::<u64>(), site.clone(), any_confinement()).prop_map(|(process, site, confinement)| {
            Verb::Enter { process: ProcessId(process), site, confinement: Box::new(confinement) }
        }),
        any::<u64>().prop_map(|process| Verb::Leave { process: ProcessId(process) }),
        any::<u64>().prop_map(|process| Verb::Measure { process: ProcessId(process) }),
        proptest::collection::vec(any_change(), 0..4).prop_map(|changes| Verb::ChangeCells { changes }),
        Just(Verb::Cells),
        (proptest::collection::vec(tenant(), 0..4), proptest::collection::vec(tenant(), 0..4))
            .prop_map(|(give_way, resume)| Verb::GiveWay { give_way, resume }),
        (site, any::<Option<u64>>()).prop_map(|(site, epoch)| Verb::UseInstance { site, epoch }),
        any::<u64>().prop_map(|instance| Verb::ConnectInstance { instance: InstanceId(instance) }),
        any::<u64>().prop_map(|instance| Verb::LeaveInstance { instance: InstanceId(instance) }),
        any::<u64>().prop_map(|tag| Verb::Forget { tag }),
        ".{0,30}".prop_map(|name| Verb::OpenCertificate { name }),
        Just(Verb::Status),
    ]
}

proptest! {
    #[test]
    fn any_ask_survives_the_wire(tag: u64, verb in any_verb()) {
        let ask = VerbCall { tag, verb };
        prop_assert_eq!(decode::<VerbCall>(&encode(&ask).unwrap()).unwrap(), ask);
    }

    #[test]
    fn hostile_bytes_decode_to_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        // What decodes must also be what its own encoding says, or two readers could disagree about
        // it.
        if let Ok(ask) = decode::<VerbCall>(&bytes) {
            prop_assert_eq!(decode::<VerbCall>(&encode(&ask).unwrap()).unwrap(), ask);
        }
    }

    #[test]
    fn a_damaged_ask_never_panics(verb in any_verb(), at: prop::sample::Index, with: u8, cut: prop::sample::Index) {
        let mut bytes = encode(&VerbCall { tag: 9, verb }).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = with;
        bytes.truncate(cut.index(bytes.len()) + 1);
        if let Ok(ask) = decode::<VerbCall>(&bytes) {
            prop_assert!(encode(&ask).is_ok());
        }
    }

    #[test]
    fn answers_survive_the_wire(tag: u64, code: u16, message in ".{0,200}", used: [u64; 4], demoted: u8) {
        let [cpu_us, read_bytes, write_bytes, throttled_us] = used;
        let usage = RequestUsage { cpu_us, read_bytes, write_bytes, throttled_us, demoted };
        let process = ProcessId(tag);
        let exit = ProcessExit { status: Some(i32::from(demoted)), signal: None, cpu_us, out_of_memory: demoted > 1 };
        let wake = WakeReport { from: Tier::Image, stages: vec![(WakeStage::Queue, cpu_us), (WakeStage::Restore, read_bytes)], predicted_us: Some(cpu_us) };
        for answer in [
            KeeperMessage::Reply { tag, reply: VerbReply::Failed { failure: FailureKind::Busy, code, message: message.clone() } },
            KeeperMessage::Reply { tag, reply: VerbReply::Spawned { process, cell: message } },
            KeeperMessage::Reply { tag, reply: VerbReply::Used { usage } },
            KeeperMessage::Reply { tag, reply: VerbReply::Using { instance: InstanceId(tag), wake: None } },
            KeeperMessage::Reply { tag, reply: VerbReply::Using { instance: InstanceId(tag), wake: Some(wake) } },
            KeeperMessage::Ended { process, exit, usage },
            KeeperMessage::Drains { instance: InstanceId(tag) },
        ] {
            prop_assert_eq!(decode::<KeeperMessage>(&encode(&answer).unwrap()).unwrap(), answer);
        }
    }
}

#[tokio::test]
async fn messages_without_room_wait_and_share_one_watch() {
    let (ours, theirs) = pair();
    rustix::io::ioctl_fionbio(&ours, true).unwrap();
    let ours = MessageSocket::new(ours).unwrap();
    let bytes = encode(&"x".repeat(4096)).unwrap();
    let mut filled = 0;
    while send(&ours, &bytes, &[]).is_ok() {
        filled += 1;
    }
    assert!(filled > 0 && ours.room.borrow().upgrade().is_none());
    let (first, second) = (ours.send(&bytes, &[]), ours.send(&bytes, &[]));
    let reader = tokio::task::spawn_blocking(move || {
        let mut buffer = Vec::new();
        for _ in 0..filled + 2 {
            // The queue may be empty for a moment.
            while let Err(error) = receive::<String>(&theirs, &mut buffer) {
                assert!(matches!(error, CodecError::NotReady), "{error}");
                std::thread::yield_now();
            }
        }
    });
    let (first, second) = tokio::join!(first, second);
    assert!(first.is_ok() && second.is_ok());
    reader.await.unwrap();
    assert!(ours.room.borrow().upgrade().is_none(), "nothing waits any more");
}
