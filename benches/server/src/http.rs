//! Requests, read from bytes, and the small responses.

use serde_json::Value;

/// One request with its whole body.
#[derive(Debug, PartialEq, Eq)]
pub struct Request {
    /// Method and path, as in `POST /generate`.
    pub target: String,
    pub body: Vec<u8>,
    pub keep_alive: bool,
}

/// What `/generate` and vLLM's token endpoint are asked for.
#[derive(Debug, PartialEq, Eq)]
pub struct Generate {
    pub rid: Option<String>,
    pub prompt_tokens: usize,
    pub max_new_tokens: usize,
}

impl Request {
    /// Take the first request out of `bytes`, if it is there as a whole.
    pub fn take(bytes: &mut Vec<u8>) -> Result<Option<Self>, String> {
        let Some(head_len) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else {
            return Ok(None);
        };
        let head = str::from_utf8(&bytes[..head_len]).map_err(|error| error.to_string())?;
        let mut lines = head.split("\r\n");
        let line = lines.next().unwrap_or_default();
        let target = line.strip_suffix(" HTTP/1.1").ok_or_else(|| format!("no HTTP/1.1 request: {line}"))?.to_owned();
        let (mut len, mut keep_alive) = (0, true);
        for field in lines {
            let (name, value) = field.split_once(':').ok_or_else(|| format!("no header field: {field}"))?;
            let value = value.trim();
            if name.eq_ignore_ascii_case("content-length") {
                len = value.parse().map_err(|_| format!("no content-length: {value}"))?;
            } else if name.eq_ignore_ascii_case("connection") {
                keep_alive = !value.eq_ignore_ascii_case("close");
            } else if name.eq_ignore_ascii_case("transfer-encoding") {
                return Err("requests must have a content-length".to_owned());
            }
        }
        let start = head_len + 4;
        if bytes.len() < start + len {
            return Ok(None);
        }
        let body = bytes[start..start + len].to_vec();
        bytes.drain(..start + len);
        Ok(Some(Self { target, body, keep_alive }))
    }

    /// Read the body as JSON.
    pub fn json(&self) -> Result<Value, String> {
        serde_json::from_slice(&self.body).map_err(|error| format!("the body is no JSON: {error}"))
    }
}

impl Generate {
    /// Read what is asked for, under SGLang's or vLLM's names.
    pub fn from_json(body: &Value) -> Result<Self, String> {
        let either = |object: &Value, names: [&str; 2]| names.iter().find_map(|name| object.get(name).cloned());
        let rid = either(body, ["rid", "request_id"]);
        let ids = either(body, ["input_ids", "token_ids"]);
        let max = either(&body["sampling_params"], ["max_new_tokens", "max_tokens"]);
        let max = max.as_ref().and_then(Value::as_u64).and_then(|max| usize::try_from(max).ok());
        Ok(Self {
            rid: rid.as_ref().and_then(Value::as_str).map(str::to_owned),
            prompt_tokens: ids.as_ref().and_then(Value::as_array).ok_or("input_ids or token_ids is missing")?.len(),
            max_new_tokens: max.filter(|max| *max > 0).ok_or("max_new_tokens or max_tokens must be at least 1")?,
        })
    }
}

/// Write a response that is no stream.
pub fn small(status: &str, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let len = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n\r\n{body}").into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_the_same_wherever_its_bytes_are_split() {
        let first = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}".as_slice();
        let second = b"GET /stats HTTP/1.1\r\nconnection: close\r\n\r\n".as_slice();
        let all = [first, second].concat();
        for split in 0..=all.len() {
            let mut bytes = Vec::new();
            let mut found = Vec::new();
            for part in [&all[..split], &all[split..]] {
                bytes.extend_from_slice(part);
                while let Some(request) = Request::take(&mut bytes).unwrap() {
                    found.push(request);
                }
            }
            let expected = [
                Request { target: "POST /generate".to_owned(), body: b"{}".to_vec(), keep_alive: true },
                Request { target: "GET /stats".to_owned(), body: Vec::new(), keep_alive: false },
            ];
            assert_eq!((found.as_slice(), bytes.len()), (expected.as_slice(), 0));
        }
    }

    #[test]
    fn both_engines_names_are_read() {
        let sglang = serde_json::json!({"rid": "a", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}});
        let vllm = serde_json::json!({"request_id": "a", "token_ids": [1, 2], "sampling_params": {"max_tokens": 3}});
        let expected = Generate { rid: Some("a".to_owned()), prompt_tokens: 2, max_new_tokens: 3 };
        assert_eq!(Generate::from_json(&sglang).as_ref(), Ok(&expected));
        assert_eq!(Generate::from_json(&vllm).as_ref(), Ok(&expected));
    }
}
