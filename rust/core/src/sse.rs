//! Server-sent events (SSE): splits the bytes of a body into the payloads of events.
//!
//! Lines end at LF, CR or CRLF only. U+2028, U+2029 and U+0085, which engines write unescaped inside JSON strings, are
//! ordinary bytes. Each byte is searched once. An event inside one read is passed on without a copy; only events that
//! reads split are copied.

mod event;
mod field;

use std::ops::Range;

use crate::error::{Error, ErrorKind, ParseError};
use crate::memory::grow;
use crate::span::MAX_EVENT;
use crate::sse::event::Origin;
pub(crate) use crate::sse::event::{Event, Next};
use crate::sse::field::{Field, field};
use crate::text::{is_ascii, is_plain};

const BOM: [u8; 3] = [0xEF, 0xBB, 0xBF];
const BOM_PAST: usize = BOM.len();

/// Bytes of a line that suffice to recognize `event: error` and `data: [DONE]`.
const STUB: usize = 16;

/// Shorter parts of a line are not looked at for [`Event::plain`].
const PLAIN_BYTES: usize = 4096;
/// In which a list has a comma: longer than any number.
const LIST_BYTES: usize = 64;

/// The memory for each further data line of an event besides its bytes: its entry in [`Origin::Lines`].
const LINE_BYTES: usize = size_of::<(usize, u64)>();

/// A complete data line in the current read that has not been copied.
struct InPlace {
    start: usize,
    end: usize,
}

/// Splits a body into events, independent of how reads split it.
pub(crate) struct Framer {
    max_event_bytes: usize,
    /// The number of bytes of a leading byte order mark matched so far.
    bom: usize,
    /// The last read ended with CR: a following LF belongs to the same line end.
    after_cr: bool,
    /// The beginning of an incomplete line. All of it has been searched.
    line: Vec<u8>,
    line_offset: u64,
    /// The data lines of the pending event. The first `data_start` bytes are the field name.
    data: Vec<u8>,
    data_start: usize,
    /// See [`Origin::Lines`]; one entry for each data line of the pending event.
    lines: Vec<(usize, u64)>,
    is_error: bool,
    /// The number of copied parts of the pending event that are not ASCII.
    other_parts: usize,
    /// The longest range of the pending event's first data line without quotes, backslashes and control characters, in
    /// `line`, then in `data`.
    plain: Range<usize>,
    /// Skip all events but `[DONE]`.
    skips_events: bool,
    /// The offset in the body of the next byte.
    position: u64,
}

impl Framer {
    pub(crate) fn new(max_event_bytes: usize) -> Self {
        Self {
            max_event_bytes: max_event_bytes.min(MAX_EVENT),
            bom: 0,
            after_cr: false,
            line: Vec::new(),
            line_offset: 0,
            data: Vec::new(),
            data_start: 0,
            lines: Vec::new(),
            is_error: false,
            other_parts: 0,
            plain: 0..0,
            skips_events: false,
            position: 0,
        }
    }

    /// Bytes received so far.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Bytes held for an incomplete event.
    pub(crate) fn held_bytes(&self) -> usize {
        self.line.capacity() + self.data.capacity() + self.lines.capacity() * size_of::<(usize, u64)>()
    }

    /// Release the buffers.
    pub(crate) fn release(&mut self) {
        self.line = Vec::new();
        self.data = Vec::new();
        self.lines = Vec::new();
    }

    /// Take the next bytes and call `on_event` for each event that they complete.
    ///
    /// After a pause, and after an error in an event, the position is behind that event.
    pub(crate) fn feed(
        &mut self,
        read: &[u8],
        mut on_event: impl FnMut(&Event<'_>) -> Result<Next, Error>,
    ) -> Result<(), Error> {
        let base = self.position;
        let mut start = self.skip_bom(read, base);
        let mut in_place: Option<InPlace> = None;
        if self.line.is_empty() {
            self.line_offset = base + start as u64;
        }
        while let Some(index) = line_end(&read[start..]) {
            let end = start + index;
            let is_lf_of_crlf = self.after_cr && end == start && self.line.is_empty() && read[end] == b'\n';
            self.after_cr = read[end] == b'\r';
            let first = std::mem::replace(&mut start, end + 1);
            self.position = base + start as u64;
            if !is_lf_of_crlf {
                let next = if self.line.is_empty() {
                    self.line(read, first..end, base, &mut in_place, &mut on_event)?
                } else {
                    self.extend_line(&read[first..end])?;
                    self.carried_line(&mut on_event)?
                };
                if next.pauses {
                    return Ok(());
                }
            }
            self.line_offset = self.position;
        }
        self.position = base + read.len() as u64;
        if start < read.len() {
            self.after_cr = false;
        }
        if let Some(line) = in_place {
            self.keep_data(&read[line.start..line.end], base + line.start as u64)?;
        }
        self.extend_line(&read[start..])
    }

    /// The body has ended: return the pending event, complete or not, if there is one.
    pub(crate) fn finish(&mut self) -> Result<Option<Event<'_>>, Error> {
        if !self.line.is_empty() {
            // Only a blank line dispatches an event, and this line is not blank.
            self.carried_line(&mut |_: &Event<'_>| Ok(Next::READ))?;
        }
        Ok(self.pending().filter(|event| !is_blank(event.data)))
    }

    /// Skip a leading byte order mark, even if it arrives byte by byte. Returns the offset of the rest.
    fn skip_bom(&mut self, read: &[u8], base: u64) -> usize {
        if self.bom == BOM_PAST {
            return 0;
        }
        let mut matched = 0;
        while self.bom < BOM_PAST && matched < read.len() && read[matched] == BOM[self.bom] {
            self.bom += 1;
            matched += 1;
        }
        if self.bom < BOM_PAST && matched < read.len() {
            // It was not a byte order mark: these bytes belong to the first line.
            self.line.extend_from_slice(&BOM[..self.bom]);
            self.other_parts += usize::from(self.bom > 0);
            self.line_offset = base + matched as u64 - self.bom as u64;
            self.bom = BOM_PAST;
        }
        matched
    }

    /// A line that is complete in the read.
    fn line(
        &mut self,
        read: &[u8],
        Range { start, end }: Range<usize>,
        base: u64,
        in_place: &mut Option<InPlace>,
        on_event: &mut impl FnMut(&Event<'_>) -> Result<Next, Error>,
    ) -> Result<Next, Error> {
        let line = &read[start..end];
        if line.is_empty() {
            if let Some(InPlace { start, end }) = in_place.take() {
                let data = &read[start..end];
                let is_ascii = is_ascii(data);
                let origin = Origin::Line(base + start as u64);
                let event = Event { data, is_error: self.is_error, is_ascii, plain: 0..0, origin };
                self.is_error = false;
                self.check_size(data.len(), event.offset(0))?;
                let next = dispatch(&event, on_event)?;
                self.skips_events |= next.skips;
                return Ok(next);
            }
            return self.dispatch_pending(on_event);
        }
        match field(line) {
            Some(Field::Data(skip)) => {
                if let Some(earlier) = in_place.take() {
                    self.keep_data(&read[earlier.start..earlier.end], base + earlier.start as u64)?;
                }
                if self.lines.is_empty() {
                    *in_place = Some(InPlace { start: start + skip, end });
                } else {
                    self.keep_data(&line[skip..], base + (start + skip) as u64)?;
                }
            }
            Some(Field::Event(is_error)) => self.is_error = is_error,
            None => {}
        }
        Ok(Next::READ)
    }

    /// A line that began in an earlier read is complete.
    fn carried_line(&mut self, on_event: &mut impl FnMut(&Event<'_>) -> Result<Next, Error>) -> Result<Next, Error> {
        match field(&self.line) {
            Some(Field::Data(skip)) => {
                let offset = self.line_offset + skip as u64;
                if self.lines.is_empty() {
                    // The first data line becomes the event's data without another copy.
                    std::mem::swap(&mut self.line, &mut self.data);
                    self.data_start = skip;
                    self.lines.push((0, offset));
                } else {
                    let line = std::mem::take(&mut self.line);
                    self.keep_data(&line[skip..], offset)?;
                    self.line = line;
                }
            }
            Some(Field::Event(is_error)) => self.is_error = is_error,
            None if self.line.is_empty() => return self.dispatch_pending(on_event),
            None => {}
        }
        if self.lines.is_empty() {
            self.plain = 0..0;
        }
        self.line.clear();
        Ok(Next::READ)
    }

    fn dispatch_pending(
        &mut self,
        on_event: &mut impl FnMut(&Event<'_>) -> Result<Next, Error>,
    ) -> Result<Next, Error> {
        let next = match self.pending() {
            Some(event) => dispatch(&event, on_event)?,
            None => Next::READ,
        };
        self.skips_events |= next.skips;
        self.is_error = false;
        self.other_parts = 0;
        self.plain = 0..0;
        self.lines.clear();
        self.data.clear();
        self.data_start = 0;
        if self.line.capacity() < self.data.capacity() {
            // One of the two buffers is enough for events of this size.
            self.line = std::mem::take(&mut self.data);
        }
        Ok(next)
    }

    fn pending(&self) -> Option<Event<'_>> {
        let origin = match self.lines[..] {
            [] => return None,
            [(_, start)] => Origin::Line(start),
            _ => Origin::Lines(&self.lines),
        };
        let data = &self.data[self.data_start..];
        let plain = self.plain.start.saturating_sub(self.data_start)..self.plain.end.saturating_sub(self.data_start);
        Some(Event { data, is_error: self.is_error, is_ascii: self.other_parts == 0, plain, origin })
    }

    /// Copy a data line to the pending event.
    fn keep_data(&mut self, value: &[u8], offset: u64) -> Result<(), Error> {
        let joined = self.data.len() - self.data_start;
        if self.skips_events && joined > STUB {
            return Ok(());
        }
        if !self.lines.is_empty() {
            self.data.push(b'\n');
        }
        self.lines.push((self.data.len() - self.data_start, offset));
        let value = if self.skips_events { &value[..value.len().min(STUB)] } else { value };
        let places = LINE_BYTES * (self.lines.len() - 1);
        self.check_size(self.data.len() - self.data_start + value.len() + places, self.lines[0].1)?;
        reserve(&mut self.data, value.len(), offset)?;
        self.other_parts += usize::from(!is_ascii(value));
        self.data.extend_from_slice(value);
        Ok(())
    }

    /// Keep the beginning of an incomplete line; only a stub of it, if its content is not needed.
    fn extend_line(&mut self, part: &[u8]) -> Result<(), Error> {
        if part.is_empty() {
            return Ok(());
        }
        let known = self.line.len().min(5);
        let mut head = [0; 5];
        head[..known].copy_from_slice(&self.line[..known]);
        let more = part.len().min(5 - known);
        head[known..known + more].copy_from_slice(&part[..more]);
        let is_data = b"data:".starts_with(&head[..known + more]);
        if self.skips_events || !is_data {
            let room = STUB.saturating_sub(self.line.len()).min(part.len());
            self.line.extend_from_slice(&part[..room]);
            return Ok(());
        }
        reserve(&mut self.line, part.len(), self.line_offset)?;
        self.other_parts += usize::from(!is_ascii(part));
        self.note_plain(part);
        self.line.extend_from_slice(part);
        // A line with "data" may still continue as "database".
        if let Some(Field::Data(skip @ 5..)) = field(&self.line) {
            let (joined, first) = match self.lines.first() {
                Some(&(_, first)) => (self.data.len() - self.data_start + 1 + LINE_BYTES * self.lines.len(), first),
                None => (0, self.line_offset + skip as u64),
            };
            self.check_size(joined + self.line.len() - skip, first)?;
        }
        Ok(())
    }

    /// Note that a long part of the line is plain, as that of a long base64 string is: while it is in the cache, a look
    /// takes little. Lists of numbers are plain too, and nobody asks: they begin with commas.
    fn note_plain(&mut self, part: &[u8]) {
        if part.len() < PLAIN_BYTES || !self.lines.is_empty() || part[..LIST_BYTES].contains(&b',') || !is_plain(part) {
            return;
        }
        let (start, end) = (self.line.len(), self.line.len() + part.len());
        if self.plain.end == start {
            self.plain.end = end;
        } else if self.plain.len() < part.len() {
            self.plain = start..end;
        }
    }

    fn check_size(&self, size: usize, offset: u64) -> Result<(), Error> {
        if size <= self.max_event_bytes || self.skips_events {
            return Ok(());
        }
        Err(too_large(
            offset,
            format!("the event is larger than {} bytes; raise max_event_bytes", self.max_event_bytes),
        ))
    }
}

/// The offset of the next line end. It comes at once behind the last line of an event.
#[inline]
fn line_end(rest: &[u8]) -> Option<usize> {
    if let Some(b'\n' | b'\r') = rest.first() { Some(0) } else { memchr::memchr2(b'\n', b'\r', rest) }
}

/// Pass an event on, unless its data is blank (a heartbeat).
fn dispatch(event: &Event<'_>, on_event: &mut impl FnMut(&Event<'_>) -> Result<Next, Error>) -> Result<Next, Error> {
    if is_blank(event.data) { Ok(Next::READ) } else { on_event(event) }
}

fn is_blank(data: &[u8]) -> bool {
    data.iter().all(|byte| matches!(byte, b' ' | b'\t' | b'\n'))
}

fn reserve(buffer: &mut Vec<u8>, more: usize, offset: u64) -> Result<(), Error> {
    if grow(buffer, more) {
        return Ok(());
    }
    Err(too_large(offset, "out of memory for the event; lower max_event_bytes".to_owned()))
}

fn too_large(offset: u64, message: String) -> Error {
    Error::Parse(ParseError { kind: ErrorKind::TooLarge, offset, path: "".into(), message: message.into() })
}
