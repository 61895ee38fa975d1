//! What one request can be told, and how much of it.

use nagaya_records::cell::CellName;

use super::*;

fn cell(name: &str, controllers: &[CgroupController]) -> NamedCell {
    let name = CellName::parse(name).unwrap();
    NamedCell {
        name,
        scope: nagaya_records::cell::CellScope::Node,
        controllers: controllers.to_vec(),
        limits: None,
    }
}

fn demotion(after_cpu_us: u64) -> Demotion {
    Demotion { after_cpu_us, limits: LimitSet { processes: Some(1), ..LimitSet::default() } }
}

#[test]
fn each_controller_is_in_the_cell_it_was_attached_to_last() {
    let mut verdict = Verdict::default();
    verdict.attach(cell("a", &[CgroupController::Cpu, CgroupController::Blkio])).unwrap();
    verdict.attach(cell("b", &[CgroupController::Blkio])).unwrap();
    let named = |verdict: &Verdict| {
        let cells = verdict.confinement.named.iter();
        cells.map(|cell| (cell.name.to_string(), cell.controllers.clone())).collect::<Vec<_>>()
    };
    assert_eq!(
        named(&verdict),
        [("a".to_owned(), vec![CgroupController::Cpu]), ("b".to_owned(), vec![CgroupController::Blkio])]
    );
    verdict.detach(&[CgroupController::Cpu]);
    assert_eq!(named(&verdict).len(), 1);
    for controller in CgroupController::ALL {
        verdict.attach(cell("c", &[controller])).unwrap();
    }
    assert_eq!(verdict.confinement.named.len(), NAMED_PER_REQUEST_MAX);
}

#[test]
fn demotions_are_in_rising_order_and_few() {
    let mut verdict = Verdict::default();
    for after in [300, 100, 200, 100, 400] {
        verdict.demote(demotion(after)).unwrap();
    }
    let steps: Vec<_> = verdict.confinement.demotions.iter().map(|step| step.after_cpu_us).collect();
    assert_eq!(steps, [100, 200, 300, 400]);
    assert!(verdict.demote(demotion(500)).is_err());
}

#[test]
fn everything_has_a_bound() {
    let mut verdict = Verdict::default();
    for n in 0..HEADER_EDITS_MAX {
        verdict.edit_header_out(&format!("x-{n}"), HeaderAction::Add("v".into())).unwrap();
        verdict.set_note(&format!("n{n}"), "v").unwrap();
        verdict.set_env(&format!("N{n}"), Some("v")).unwrap();
        verdict.say(LogLevel::Info, "line");
    }
    assert!(verdict.edit_header_out("x-more", HeaderAction::Remove).is_err());
    verdict.edit_header_out("X-0", HeaderAction::Set("again".into())).unwrap();
    assert!(verdict.set_note("more", "v").is_err());
    verdict.set_note("n0", "again").unwrap();
    assert_eq!(verdict.note("n0"), Some("again"));
    assert!(verdict.set_env("MORE", None).is_err());
    assert_eq!(verdict.log.len() + verdict.log_left_out as usize, HEADER_EDITS_MAX);
    assert!(verdict.set_note("n1", &"x".repeat(VALUE_LEN_MAX + 1)).is_err());
    assert!(verdict.write(&vec![0; ANSWER_LEN_MAX]).is_ok() && verdict.write(b"x").is_err());
    verdict.log.clear();
    verdict.say(LogLevel::Error, &"ä".repeat(LOG_LINE_LEN_MAX));
    assert_eq!(verdict.log[0].1.len(), LOG_LINE_LEN_MAX);
    let change = CellChange::Drop { name: CellName::parse("a").unwrap(), controllers: vec![] };
    (0..CHANGES_MAX).for_each(|_| verdict.change(change.clone()).unwrap());
    assert!(verdict.change(change).is_err());
}

#[test]
fn value_that_would_break_out_of_its_place_is_refused() {
    let mut verdict = Verdict::default();
    for bad in ["", "a b", "a:", "a\r\nb", "ä"] {
        assert!(verdict.edit_header_in(bad, HeaderAction::Remove).is_err(), "{bad}");
    }
    for bad in ["a\r\nSet-Cookie: b", "a\nb", "\0"] {
        assert!(verdict.edit_header_out("x", HeaderAction::Add(bad.into())).is_err(), "{bad:?}");
        assert!(verdict.set_env("A", Some(bad)).is_err(), "{bad:?}");
    }
    assert!(verdict.set_env("A=B", Some("c")).is_err());
    for bad in [0, 100, 199, 600] {
        assert!(verdict.set_status(bad).is_err(), "{bad}");
    }
    assert!(
        verdict.set_lane("", LaneRun::Auto, None, true).is_err()
            && verdict.set_lane("a", LaneRun::Fixed(0), None, true).is_err()
    );
    assert!(verdict.is_silent(), "{verdict:?}");
}

#[test]
fn the_last_word_on_a_header_field_counts() {
    let mut verdict = Verdict::default();
    verdict.edit_header_out("Set-Cookie", HeaderAction::Add("a=1".into())).unwrap();
    verdict.edit_header_out("set-cookie", HeaderAction::Add("b=2".into())).unwrap();
    verdict.edit_header_out("x", HeaderAction::Set("1".into())).unwrap();
    verdict.edit_header_out("X", HeaderAction::Remove).unwrap();
    let actions: Vec<_> = verdict.headers_out.iter().map(|edit| &edit.action).collect();
    assert_eq!(
        actions,
        [&HeaderAction::Add("a=1".into()), &HeaderAction::Add("b=2".into()), &HeaderAction::Remove]
    );
}

#[test]
fn a_verdict_goes_back_to_what_it_was() {
    let mut verdict = Verdict::default();
    let file: Arc<str> = "a.rb".into();
    let silent = verdict.checkpoint();
    assert!(silent.is_none(), "nothing to copy");
    verdict.set_note("a", "1").unwrap();
    verdict.say(LogLevel::Info, "stays");
    verdict.roll_back(silent);
    assert_eq!((verdict.notes.len(), verdict.log.len()), (0, 1));

    verdict.set_note("a", "1").unwrap();
    verdict.spoken(RulePhase::Fixups, &file);
    let before = verdict.clone();
    let checkpoint = verdict.checkpoint();
    verdict.set_note("a", "2").unwrap();
    verdict.limit(&LimitSet { processes: Some(1), ..LimitSet::default() });
    verdict.roll_back(checkpoint);
    assert_eq!(verdict, before);
    assert!(verdict.has(VerdictTopic::Note) && !verdict.has(VerdictTopic::Limits));
}
