//! A store as the frames that edge and keeper are given when they start.
//!
//! Not here: sending them (`nagaya`), what they mean (`nagaya_records::feed`).

use std::io;

use nagaya_records::feed::BATCH_MAX;

use crate::contract::{RECORD_LEN_MAX, RecordKind, Store, WRAPPING_LEN};
use crate::error::StoreError;

/// Size at which a frame of a snapshot is closed, so that neither end holds much at once.
const SNAPSHOT_FRAME_LEN: usize = 1 << 20;

const _: () = assert!(BATCH_MAX * (RECORD_LEN_MAX + WRAPPING_LEN) <= nagaya_records::feed::FRAME_LEN_MAX);

/// Passes the store as encoded `feed::Down::Apply` frames, without decoding the records. Rules are
/// left out, as processes have them as files. The caller sends `Down::Commit` with the returned
/// revision after the last frame.
pub fn snapshot_frames(
    store: &dyn Store,
    send: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> Result<u64, StoreError> {
    let mut frame = Vec::new();
    let mut records = 0;
    let revision = store.walk(&mut |kind, json| {
        let begin: &[u8] = match kind {
            RecordKind::Tenant => b"{\"put_tenant\":",
            RecordKind::Site => b"{\"put_site\":",
            RecordKind::Setting => b"{\"put_setting\":",
            RecordKind::Rule => return Ok(()),
            RecordKind::Node => b"{\"put_node\":",
            RecordKind::Placement => b"{\"put_placement\":",
            RecordKind::TicketKeys => b"{\"put_ticket_keys\":",
        };
        if records == BATCH_MAX || frame.len() >= SNAPSHOT_FRAME_LEN {
            close_frame(&mut frame, send)?;
            records = 0;
        }
        frame.extend_from_slice(if records == 0 { b"\0\0\0\0{\"apply\":[" } else { b"," });
        frame.extend_from_slice(begin);
        frame.extend_from_slice(json.as_bytes());
        frame.push(b'}');
        records += 1;
        Ok(())
    })?;
    if records > 0 {
        close_frame(&mut frame, send).map_err(StoreError::Visitor)?;
    }
    Ok(revision)
}

fn close_frame(frame: &mut Vec<u8>, send: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    frame.extend_from_slice(b"]}");
    let len = u32::try_from(frame.len() - 4).expect("BATCH_MAX records fit a frame");
    frame[..4].copy_from_slice(&len.to_le_bytes());
    send(frame)?;
    frame.clear();
    Ok(())
}
