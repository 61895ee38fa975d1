//! Decodes zstd data as one stream: frame after frame, whatever is between them (RFC 8878, section
//! 3).
//!
//! Not here: a frame itself (`ruzstd`), the contents (`layer`).

use std::io::{self, Read};

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};

/// Maximum distance back that a frame may refer to, which is held in memory, bytes. It is `zstd`'s
/// own default limit.
const WINDOW_LEN_MAX: u64 = 128 << 20;

/// Number of bytes that are decoded before any are returned, or a block more.
const STEP_LEN: usize = 256 << 10;

/// Decodes a reader.
pub struct ZstdReader<R> {
    from: R,
    decoder: FrameDecoder,
    /// In a frame that is not at its end.
    in_frame: bool,
}

impl<R: Read> ZstdReader<R> {
    pub fn new(from: R) -> Self {
        let mut decoder = FrameDecoder::new();
        decoder.set_max_window_size(WINDOW_LEN_MAX);
        Self { from, decoder, in_frame: false }
    }

    /// Begins the next frame. Returns false if there is none.
    fn begin(&mut self) -> io::Result<bool> {
        loop {
            let mut first = [0];
            if self.from.read(&mut first)? == 0 {
                return Ok(false);
            }
            match self.decoder.init(first.chain(&mut self.from)) {
                Ok(()) => return Ok(true),
                // Data of the file's maker, such as a table of contents.
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame {
                    length,
                    ..
                })) => {
                    if io::copy(&mut (&mut self.from).take(length.into()), &mut io::sink())? < length.into() {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                }
                Err(error) => return Err(wrong(&error)),
            }
        }
    }

    /// Ends a frame, all of which has been returned.
    fn end(&mut self) -> io::Result<()> {
        self.in_frame = false;
        match (self.decoder.get_checksum_from_data(), self.decoder.get_calculated_checksum()) {
            (Some(expected), Some(is)) if expected != is => Err(wrong(&"its checksum is another")),
            _ => Ok(()),
        }
    }
}

impl<R: Read> Read for ZstdReader<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        while !to.is_empty() {
            if self.in_frame && self.decoder.can_collect() > 0 {
                return self.decoder.read(to);
            } else if self.in_frame && !self.decoder.is_finished() {
                let step = BlockDecodingStrategy::UptoBytes(STEP_LEN);
                self.decoder.decode_blocks(&mut self.from, step).map_err(|error| wrong(&error))?;
            } else if self.in_frame {
                self.end()?;
            } else if self.begin()? {
                self.in_frame = true;
            } else {
                break;
            }
        }
        Ok(0)
    }
}

fn wrong(why: &dyn std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("it is no zstd: {why}"))
}
