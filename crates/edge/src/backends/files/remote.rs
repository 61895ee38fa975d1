//! Reads bodies from file systems that may hang: on the blocking pool, piece by piece. The kernel
//! does not send them.
//!
//! Not here: which file systems those are (the keeper's `mount_list`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::Frame;
use tokio::time::timeout;

use crate::backends::files::HANG_MAX;
use crate::blocking::{BlockingPool, DeviceShare};
use crate::http::body_adapters::{FrameResult, PolledBody};
use crate::http::message::{BodyError, BodyPart, Response, ResponseBody};

/// Number of bytes read at once. One message of most network file systems carries a part of it.
const READ_LEN: u64 = 256 << 10;

pub(super) fn sent_from_pool(
    mut response: Response,
    pool: &Arc<BlockingPool>,
    share: DeviceShare,
) -> Response {
    response.body = body(response.body, pool, share);
    response
}

/// Returns the same bytes, without a file for the kernel.
pub(super) fn body(body: ResponseBody, pool: &Arc<BlockingPool>, share: DeviceShare) -> ResponseBody {
    let parts = match body {
        ResponseBody::File { file, offset, len } => VecDeque::from([BodyPart::File { file, offset, len }]),
        ResponseBody::Parts(parts) => parts.into(),
        other => return other,
    };
    let left = parts.iter().map(BodyPart::len).sum();
    let mut reader = RemoteReader { parts, reading: None, pool: Arc::clone(pool), share };
    ResponseBody::stream(PolledBody::with_len(Some(left), move |cx| reader.poll(cx)))
}

type RemoteRead = Pin<Box<dyn Future<Output = io::Result<Bytes>>>>;

struct RemoteReader {
    parts: VecDeque<BodyPart>,
    reading: Option<RemoteRead>,
    pool: Arc<BlockingPool>,
    share: DeviceShare,
}

impl RemoteReader {
    fn begin(&self, file: Arc<OwnedFd>, offset: u64, len: u64) -> RemoteRead {
        let (pool, share) = (Arc::clone(&self.pool), self.share);
        Box::pin(async move {
            let read = pool.run(share, move || read_exact(&file, offset, len));
            let hangs = || io::Error::new(io::ErrorKind::TimedOut, "its file system does not answer");
            timeout(HANG_MAX, read).await.map_err(|_| hangs())?.map_err(|_| hangs())?
        })
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<FrameResult>> {
        while self.reading.is_none() {
            let Some(part) = self.parts.front_mut() else { return Poll::Ready(None) };
            if part.is_empty() {
                self.parts.pop_front();
                continue;
            }
            match part.split_to(READ_LEN) {
                BodyPart::Bytes(bytes) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                BodyPart::File { file, offset, len } => self.reading = Some(self.begin(file, offset, len)),
            }
        }
        let Some(reading) = &mut self.reading else { return Poll::Ready(None) };
        let read = ready!(reading.as_mut().poll(cx));
        self.reading = None;
        Poll::Ready(Some(read.map(Frame::data).map_err(BodyError::File)))
    }
}

fn read_exact(file: &OwnedFd, offset: u64, len: u64) -> io::Result<Bytes> {
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    let mut filled = 0;
    while filled < bytes.len() {
        let at = offset + filled as u64;
        match rustix::io::retry_on_intr(|| rustix::io::pread(file, &mut bytes[filled..], at))? {
            0 => {
                let what = "the file became shorter while it was sent";
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
            }
            read => filled += read,
        }
    }
    Ok(bytes.into())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use http_body_util::BodyExt;

    use super::*;
    use crate::blocking::BlockingDevice;

    #[tokio::test]
    async fn parts_of_a_file_come_in_their_order() {
        let whole: Vec<u8> = (0..700_000u32).map(|n| n as u8).collect();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&whole).unwrap();
        let file: Arc<OwnedFd> = Arc::new(file.into());
        let part = |offset: u64, len| BodyPart::File { file: Arc::clone(&file), offset, len };
        let parts = vec![part(0, 600_000), BodyPart::Bytes(Bytes::from_static(b"--")), part(5, 10)];
        let right = [&whole[..600_000], b"--", &whole[5..15]].concat();
        let share = DeviceShare::new(BlockingDevice::Files(0, 1), &1);
        let sent = body(ResponseBody::Parts(parts), &Arc::default(), share);
        assert_eq!(sent.len(), Some(right.len() as u64));
        let ResponseBody::Stream(stream) = sent else { panic!("the kernel would send it") };
        assert!(stream.collect().await.unwrap().to_bytes() == right);
    }
}
