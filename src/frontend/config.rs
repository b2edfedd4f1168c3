//! What a front-end is told when it is started. It travels as one JSON argument.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::mount::MountOptions;
use crate::control::message::{BackendOptions, SecretFiles};
use crate::control::{Channel, Source};

/// Everything a front-end needs to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrontendConfig {
    /// What to serve.
    pub source: Source,
    /// Where and how to mount it.
    pub mount: MountOptions,
    /// What requests get while no backend serves.
    #[serde(default)]
    pub outage: OutagePolicy,
    /// How requests reach the backend.
    #[serde(default)]
    pub channel: Channel,
    /// How a backend is to serve.
    #[serde(default)]
    pub backend: BackendOptions,
    /// A second session keeps deleted files in use while no backend serves.
    #[serde(default)]
    pub standby: bool,
    /// Configuration and key for the backend come in a memory file as the standard input.
    #[serde(default)]
    pub secrets: bool,
    /// Where they were read from.
    #[serde(default)]
    pub secret_files: SecretFiles,
}

/// What happens to requests while no backend serves.
///
/// Read and written as on the command line: `queue`, `queue:SECONDS`, `error`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum OutagePolicy {
    /// They wait, for as long as it takes.
    #[default]
    Queue,
    /// They wait this long; then they get EIO until a backend serves again.
    QueueFor(Duration),
    /// They get EIO at once.
    Error,
}

/// An outage policy that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("outage policy '{0}' is not known; write queue, queue:SECONDS or error")]
pub struct OutagePolicyError(String);

impl FromStr for OutagePolicy {
    type Err = OutagePolicyError;

    fn from_str(text: &str) -> Result<OutagePolicy, OutagePolicyError> {
        match text {
            "queue" => Ok(OutagePolicy::Queue),
            "error" => Ok(OutagePolicy::Error),
            _ => text
                .strip_prefix("queue:")
                .and_then(|seconds| seconds.parse().ok())
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .map(OutagePolicy::QueueFor)
                .ok_or_else(|| OutagePolicyError(text.to_owned())),
        }
    }
}

impl fmt::Display for OutagePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OutagePolicy::Queue => f.write_str("queue"),
            OutagePolicy::QueueFor(time) => write!(f, "queue:{}", time.as_secs_f64()),
            OutagePolicy::Error => f.write_str("error"),
        }
    }
}

impl TryFrom<String> for OutagePolicy {
    type Error = OutagePolicyError;

    fn try_from(text: String) -> Result<OutagePolicy, OutagePolicyError> {
        text.parse()
    }
}

impl From<OutagePolicy> for String {
    fn from(policy: OutagePolicy) -> String {
        policy.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_outage_policy_is_read_back_as_it_was_written() {
        for text in ["queue", "queue:30", "queue:0.5", "error"] {
            assert_eq!(text.parse::<OutagePolicy>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "queue:",
            "queue:-1",
            "queue:nan",
            "queue:1e300",
            "Error",
        ] {
            let error = text.parse::<OutagePolicy>().unwrap_err();
            assert!(error.to_string().contains("queue:SECONDS"), "{text}");
        }
    }

    #[test]
    fn a_configuration_without_choices_gets_the_defaults() {
        let json = r#"{"source":"dir:/a","mount":{"mountpoint":"/m","fsname":"dir:/a"}}"#;
        let config: FrontendConfig = serde_json::from_str(json).unwrap();
        assert_eq!(config.outage, OutagePolicy::Queue);
        assert_eq!(config.channel, Channel::Relay);
        let again = serde_json::to_string(&config).unwrap();
        assert_eq!(
            serde_json::from_str::<FrontendConfig>(&again).unwrap(),
            config
        );
    }
}
