{{/* Labels that select the pods of a component. Call with (dict "root" . "component" NAME). */}}
{{- define "triplane.selector" -}}
app.kubernetes.io/name: triplane
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{/* Labels of an object. Call with (dict "root" . "component" NAME). */}}
{{- define "triplane.labels" -}}
{{ include "triplane.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* Labels and the namespace of an object's metadata. Call with (dict "root" . "component" NAME "name" NAME), and "kind"
of a StatefulSet, whose pods have its name and 11 more characters in a label. */}}
{{- define "triplane.metadata" -}}
{{- $kind := .kind | default "Service" }}
{{- $most := eq $kind "StatefulSet" | ternary 52 63 }}
{{- if gt (len .name) $most }}
{{- fail (print .name ": " (len .name) " characters, but the name of a " $kind " has at most " $most ": shorten that of the release or of the experiment") }}
{{- end }}
{{- if not (regexMatch "^[a-z][-a-z0-9]*$" .name) }}
{{- fail (print .name ": the name of a Service begins with a letter, and has letters, digits and - alone: rename the release " .root.Release.Name) }}
{{- end }}
name: {{ .name }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "triplane.labels" . | nindent 2 }}
{{- end }}

{{/* Reference of an image: by digest where one is given. Call with (dict "root" . "image" VALUES). */}}
{{- define "triplane.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ include "triplane.version" (print .image.repository ":" (.image.tag | default .root.Chart.AppVersion)) }}
{{- end -}}
{{- end }}

{{/* A reference of an image, refused where it may name another image tomorrow. */}}
{{- define "triplane.version" -}}
{{- if hasSuffix ":latest" . }}
{{- fail (print "image " . ": the tag latest names no version; give the version or the digest of an image") }}
{{- end }}
{{- . }}
{{- end }}

{{/* MiB of a text such as 256mb (of Redis, by powers of 1024) or 1Gi. */}}
{{- define "triplane.mebibytes" -}}
{{- mul (regexFind "[0-9]+" . | int) (get (dict "m" 1 "g" 1024 "t" 1048576) (regexFind "[a-zA-Z]" . | lower)) }}
{{- end }}

{{/* Name of an experiment within names of objects, which have no underscores. */}}
{{- define "triplane.experiment" -}}
{{ . | replace "_" "-" }}
{{- end }}

{{/* Security context of a pod. Call with a user id. */}}
{{- define "triplane.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* Security context of a container. */}}
{{- define "triplane.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
{{- end }}

{{/* Nodes of a pod. Call with values that may have nodeSelector, tolerations and priorityClassName. */}}
{{- define "triplane.nodes" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Fields that every pod of ours has. Call with (dict "root" . "account" NAME). */}}
{{- define "triplane.pod" -}}
serviceAccountName: {{ .root.Release.Name }}-{{ .account }}
# variables that Kubernetes makes of Services would collide with ours: TRIPLANE_ENVD_PORT is one of a release "triplane"
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Sources of a container's environment: the common ConfigMap and the credentials of S3. */}}
{{- define "triplane.envFrom" -}}
- configMapRef:
    name: {{ .Release.Name }}-env
{{- with .Values.s3.existingSecret }}
- secretRef:
    name: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Variables of Dagster's pods that come from Secrets one by one. */}}
{{- define "triplane.dagsterEnv" -}}
- name: DAGSTER_POSTGRES_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.postgres.existingSecret | quote }}
      key: {{ .Values.postgres.passwordKey | quote }}
{{- end }}

{{/* Mounts of a container that runs Triplane's code: nothing else can be written. */}}
{{- define "triplane.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/lib/triplane/cache
{{- if .Values.experiments.configMap }}
- name: experiments
  mountPath: /var/lib/triplane/experiments
  readOnly: true
{{- end }}
{{- end }}

{{/* Volumes of triplane.mounts. */}}
{{- define "triplane.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.cache.sizeLimit }}
{{- if .Values.experiments.configMap }}
- name: experiments
  configMap:
    name: {{ .Values.experiments.configMap | quote }}
{{- end }}
{{- end }}

{{/* Mounts of Dagster's containers: an instance, and envd's key for those that play episodes. */}}
{{- define "triplane.dagsterMounts" -}}
{{ include "triplane.mounts" . }}
- name: home
  mountPath: /var/lib/triplane/dagster
- name: instance
  mountPath: /var/lib/triplane/dagster/dagster.yaml
  subPath: dagster.yaml
  readOnly: true
- name: instance
  mountPath: /var/lib/triplane/dagster/workspace.yaml
  subPath: workspace.yaml
  readOnly: true
- name: envd-key
  mountPath: /var/run/triplane-envd
  readOnly: true
{{- end }}

{{/* Volumes of triplane.dagsterMounts. */}}
{{- define "triplane.dagsterVolumes" -}}
{{ include "triplane.volumes" . }}
- name: home
  emptyDir: {}
- name: instance
  configMap:
    name: {{ .Release.Name }}-instance
{{ include "triplane.envdKey" . }}
{{- end }}

{{/* Volume with the key of sandbox servers. */}}
{{- define "triplane.envdKey" -}}
- name: envd-key
  secret:
    secretName: {{ .Values.envd.existingSecret | quote }}
    defaultMode: 0440
    items:
      - key: {{ .Values.envd.secretKey | quote }}
        path: key
{{- end }}

{{/* Annotations that start pods anew after their configuration changed. */}}
{{- define "triplane.checksums" -}}
checksum/instance: {{ include (print .Template.BasePath "/instance.yaml") . | sha256sum }}
checksum/env: {{ include (print .Template.BasePath "/env.yaml") . | sha256sum }}
{{- end }}

{{/* Address of PostgreSQL. */}}
{{- define "triplane.postgresHost" -}}
{{- if .Values.postgres.enabled -}}
{{ .Release.Name }}-postgres
{{- else -}}
{{ required "postgres.host: give the address of a PostgreSQL server, or set postgres.enabled=true" .Values.postgres.host }}
{{- end -}}
{{- end }}

{{/* Peers of a NetworkPolicy: those of the values, else pods of the same namespace. */}}
{{- define "triplane.peers" -}}
{{- toYaml (. | default (list (dict "podSelector" dict))) }}
{{- end }}

{{/* What the router routes to in this release, as YAML: address, eventsPort; empty without `to`.
Call with (dict "root" . "router" VALUES). */}}
{{- define "triplane.routed" -}}
{{- $router := .router }}
{{- with $router.to }}
{{- $found := false }}
{{- range index $.root.Values . }}
{{- if eq .experiment $router.experiment }}
{{- $found = true }}
eventsPort: {{ .eventsPort | default 0 }}
{{- end }}
{{- end }}
{{- if not $found }}
{{- fail (print "routers: " $router.experiment ": to: " $router.to " has no entry of it; add one, or give servers") }}
{{- end }}
address: dns:{{ $.root.Release.Name }}-{{ trimSuffix "s" . }}-{{ include "triplane.experiment" $router.experiment }}{{ eq . "samplers" | ternary "-replicas" "" }}.{{ $.root.Release.Namespace }}.svc:8000
{{- end }}
{{- end }}
